"""Checkpoints written out again in other formats, for programs that read nothing else; all of them float."""
