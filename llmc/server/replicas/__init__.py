"""Several server processes behind one socket: a supervisor accepts connections and passes them to replicas."""
