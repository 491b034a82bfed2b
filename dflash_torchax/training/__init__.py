"""Training a draft for a target: its own continuations, a masked forward over many blocks, an export anyone can load.

One file per job: `prompts` (what to ask), `corpus` (what the target answered).
"""
