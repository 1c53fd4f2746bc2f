"""From a checkpoint to a bundle: plan, compile, verify and publish, with reports before and after."""
