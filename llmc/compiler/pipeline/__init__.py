"""From a checkpoint to a bundle: plan, compile, verify, publish; and reports before and after."""
