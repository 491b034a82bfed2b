"""Training a draft for a target: its own continuations, a masked forward over many blocks, an export anyone can load.

One file per job: `prompts` (what to ask), `corpus` (what the target answered), `taps` (its hidden states), `dataset` (batches),
`initial` (new drafts), `blocks` and `chains` (the learners of DFlash and EAGLE-3, over `learner` and `losses`), `trainer` (the
loop, over `checkpoint`), `export` (the result), `run` (all of it in one folder).
"""
