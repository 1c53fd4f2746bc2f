"""When a hybrid pays: prompts on one device, decode on another, against the better of the two alone."""
