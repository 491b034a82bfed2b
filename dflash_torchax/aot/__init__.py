"""Programs compiled ahead of time for a TPU that is not here, from configs alone, and what the compiler says of them."""
