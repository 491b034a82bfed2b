"""Prompts in HF's layout (left-padded tensors) to ours (right-padded rows and lengths) and back; refuses what is neither."""

import numpy as np
import torch


def check_tensors(arguments):
    """Raise ValueError where ids or mask are no integer tensors [batch, length]; HF's own preparation fails obscurely."""
    for name in ("inputs", "input_ids", "attention_mask"):
        value = arguments.get(name)
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.ndim != 2:
            got = f"{value.ndim}-D of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            shown = "input_ids" if name == "inputs" else name
            raise ValueError(f"{shown}: {got}; give a torch tensor [batch, length], e.g. tokenizer(..., return_tensors='pt').")
        if len(value) == 0:
            raise ValueError(f"{name}: an empty batch of shape {tuple(value.shape)}; give at least one row.")
        if name != "attention_mask" and value.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name}: dtype {value.dtype}; token ids are torch.long (or int32).")


def right_padded(input_ids, attention_mask):
    """HF's left-padded batch -> (int32 [batch, width] right-padded, int32 [batch] lengths)."""
    ids = input_ids.cpu().numpy()
    mask = np.ones_like(ids) if attention_mask is None else attention_mask.cpu().numpy()
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask: shape {mask.shape} for input_ids of shape {ids.shape}; they must be equal.")
    mask = mask != 0
    lengths = mask.sum(axis=1).astype(np.int32)
    if ids.shape[1] == 0 or (lengths == 0).any():
        raise ValueError(f"input_ids: empty prompt (lengths {lengths.tolist()}); each row needs at least one token.")
    if not (np.diff(mask.astype(np.int8), axis=1) >= 0).all():
        row = int(np.argmax((np.diff(mask.astype(np.int8), axis=1) < 0).any(axis=1)))
        raise ValueError(f"attention_mask: row {row} is {mask[row].astype(int).tolist()}; only left padding is supported "
                         f"(zeros, then ones). Set tokenizer.padding_side = 'left', and pass the attention_mask when a "
                         f"prompt contains the pad token.")
    width = int(lengths.max())
    prompt = np.zeros((len(ids), width), np.int32)
    for row, length in enumerate(lengths):
        prompt[row, :length] = ids[row, ids.shape[1] - length :]
    return prompt, lengths


def padded_output(input_ids, request, generation, pad_id):
    """HF's output: the given ids, then the new tokens, pad_id after a row's end."""
    counts = generation.lengths - request.lengths
    new = np.full((len(counts), int(counts.max())), pad_id, np.int64)
    for row, (start, count) in enumerate(zip(request.lengths, counts, strict=True)):
        new[row, :count] = generation.tokens[row, start : start + count]
    return torch.cat([input_ids.cpu(), torch.from_numpy(new)], dim=1)
