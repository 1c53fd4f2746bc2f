"""From a checkpoint to a bundle: plan, compile, verify, publish; and what is told of it before and after."""
