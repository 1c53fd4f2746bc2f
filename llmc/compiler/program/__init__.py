"""Lowering: traced program → small graph language → fused graph → one compiler's form, with weights outside."""
