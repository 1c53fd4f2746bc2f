"""numpy as a device."""
