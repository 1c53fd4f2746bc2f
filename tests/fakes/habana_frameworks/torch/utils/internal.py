import os


def is_lazy() -> bool:
    """Read once, as the bridge does: whoever wants another mode sets it before the import."""
    if is_lazy._is_lazy is None:
        is_lazy._is_lazy = os.getenv("PT_HPU_LAZY_MODE", "1") != "0"
    return is_lazy._is_lazy


is_lazy._is_lazy = None
