from habana_frameworks.torch import _accelerator


def _flush_disk_cache() -> None:
    """Wait until recipes are on disk; without it they may be missing there."""
    _accelerator.accelerator().flush()
