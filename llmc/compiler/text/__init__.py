"""Tokenizer and chat template, as files of a bundle."""
