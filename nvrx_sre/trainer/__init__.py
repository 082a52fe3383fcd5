"""Reference trainer: byte-level Llama-shaped language model on real text."""
