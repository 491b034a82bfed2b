"""Laws: every argument of the installed transformers is supported, on the host path, or refused by name; HF's spellings."""

import inspect
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerFast, pipeline

from dflash_torchax import arguments, disable, enable, enabled, last_stats, stream_blocks

from .tiny import ScriptedProposer, random_draft, random_prompts, scripts, tiny_target

INTERNAL = {"transformers_version"}


@pytest.fixture(scope="module")
def model():
    return tiny_target()


def test_every_config_field_is_in_the_table():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - INTERNAL
    assert fields - set(arguments.CONFIG) == set()
    assert {a.kind for a in arguments.CONFIG.values()} == {"supported", "host path", "refused"}


def test_every_argument_of_generate_is_in_the_table():
    names = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert names - set(arguments.CALL) == set()


def test_the_documented_table_is_this_one():
    root = Path(__file__).parents[1]
    assert "\n".join(arguments.support_table()) in root.joinpath("docs", "arguments.md").read_text()
    assert "\n".join(arguments.support_summary()) in root.joinpath("README.md").read_text()


def test_refused_fields_are_refused(model):
    """Every refused field, set to something, raises and names itself."""
    values = {"num_beams": 3, "num_beam_groups": 2, "diversity_penalty": 0.5, "penalty_alpha": 0.6, "num_assistant_tokens": 7,
              "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.9, "prefill_chunk_size": 8}
    with enabled(model, random_draft(model)):
        for name, argument in arguments.CONFIG.items():
            if argument.kind != "refused":
                continue
            config = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
            setattr(config, name, values.get(name, True))
            with pytest.raises(Exception, match="(?s)" + name) as caught:
                arguments.refuse_unsupported(config, {})
            assert caught.type is NotImplementedError


def test_assistant_model_is_hfs_spelling_of_a_draft(model):
    ids = torch.tensor(random_prompts((9,)))
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    draft = random_draft(model)
    for first in (None, draft):
        with enabled(tiny_target(), first) as ours:
            output = ours.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=draft)
            assert torch.equal(output, expected)
            assert last_stats(ours).num_drafted_tokens > 0
            again = ours.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=draft, speculation_type="dflash")
            assert torch.equal(again, expected)
            with pytest.raises(NotImplementedError, match="assistant_model"):
                ours.generate(ids, max_new_tokens=3, do_sample=False, assistant_model=model)
            with pytest.raises((NotImplementedError, ValueError), match="speculation_type"):
                ours.generate(ids, max_new_tokens=3, do_sample=False, speculation_type="mtp")


def test_stream_blocks(model):
    prompts = random_prompts((9,))
    script = scripts(model, prompts, 20)
    with enabled(tiny_target(), ScriptedProposer(script, 8)) as ours:
        blocks = list(stream_blocks(ours, torch.tensor(prompts), max_new_tokens=20, do_sample=False))
        stats = last_stats(ours)
    assert [token for ids, _ in blocks for token in ids[0]] == script[0, 9:].tolist()
    assert [accepted[0] for _, accepted in blocks[1:]] == stats.accepted_per_step[0] == [7, 7, 2]
    assert [len(ids[0]) for ids, _ in blocks] == [1, 8, 8, 3]
    with pytest.raises(ValueError, match="enable"):
        next(stream_blocks(model, torch.tensor(prompts)))


def _tokenizer():
    """One printable character per id."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    characters = ["<pad>", "<eos>", "\u0120", *(chr(code) for code in range(33, 127))]
    inner = Tokenizer(BPE({character: i for i, character in enumerate(characters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def test_pipeline(model):
    tokenizer = _tokenizer()
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": False}
    prompts = ["Hello there", "12+7"]
    expected = [pipeline("text-generation", model=model, tokenizer=tokenizer)(p, **options)[0]["generated_text"] for p in prompts]
    ours = enable(tiny_target(), random_draft(model))
    text = pipeline("text-generation", model=ours, tokenizer=tokenizer)
    assert [text(p, **options)[0]["generated_text"] for p in prompts] == expected
    batched = text(prompts, batch_size=2, **options)
    assert [row[0]["generated_text"] for row in batched] == expected
    assert last_stats(ours).num_drafted_tokens > 0


@pytest.mark.parametrize("kind", ["perfect", "random"])
def test_stop_strings(model, kind):
    tokenizer = _tokenizer()
    prompts = random_prompts((9,))
    script = scripts(model, prompts, 20)
    draft = ScriptedProposer(script, 8) if kind == "perfect" else random_draft(model)
    ids = torch.tensor(prompts)
    with enabled(tiny_target(), draft) as ours:
        for offset in (0, 3, 8, 12):
            options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0,
                       "stop_strings": tokenizer.decode(script[0, 9 + offset : 11 + offset])}
            expected = model.generate(ids, tokenizer=tokenizer, **options)
            assert torch.equal(ours.generate(ids, tokenizer=tokenizer, **options), expected)
            strings = options.pop("stop_strings")
            for holder in (ours.generation_config, model.generation_config):
                holder.stop_strings = [strings]
            assert torch.equal(ours.generate(ids, tokenizer=tokenizer, **options), expected), "in the model's own config"
            for holder in (ours.generation_config, model.generation_config):
                holder.stop_strings = None
            config = GenerationConfig(stop_strings=[strings], **options)
            assert torch.equal(ours.generate(ids, config, tokenizer=tokenizer), expected), "in a positional config"
        with pytest.raises(ValueError, match="(?s)stop.strings.*tokenizer"):
            ours.generate(ids, max_new_tokens=3, stop_strings="w3")


def test_positional_arguments(model):
    ids = torch.tensor(random_prompts((9,)))
    config = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, config)
    from .test_stopping import Recorder

    streamer, draft = Recorder(), random_draft(model, block_size=4)
    with enabled(tiny_target(), random_draft(model)) as ours:
        assert torch.equal(ours.generate(ids, config, None, None, None, None, draft, streamer), expected)
        assert len(last_stats(ours).accepted_by_position) == 3, "the positional assistant drafted"
        with pytest.raises(TypeError, match="generation_config"):
            ours.generate(ids, config, generation_config=config)
    assert len(streamer.puts) == 13


def test_guidance_scale(model):
    """The unconditional branch runs HF's own object on the torch model."""
    ids = torch.tensor(random_prompts((9,)))
    options = {"max_new_tokens": 10, "do_sample": False, "guidance_scale": 1.5}
    expected = model.generate(ids, **options)
    ours = enable(tiny_target(), random_draft(model))
    output = ours.generate(ids, output_scores=True, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, expected)
    assert not output.scores[0].requires_grad
    disable(ours)
