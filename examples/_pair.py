"""Which target and draft an example runs: the embedded pair, or what the user names."""

import dflash_torchax as dflash


def add_pair_arguments(parser):
    parser.add_argument("--target", help="HF model folder or repo; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--draft", help="DFlash draft folder or repo for that target")
    parser.add_argument("--max-new-tokens", type=int, default=64)


def load_pair(args):
    """(model, draft or None, tokenizer)."""
    if not args.target:
        return dflash.load_embedded()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.target), AutoTokenizer.from_pretrained(args.target)
    return model, dflash.load_draft(args.draft) if args.draft else None, tokenizer
