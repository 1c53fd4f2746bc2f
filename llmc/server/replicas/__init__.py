"""Several server processes behind one socket: a supervisor that accepts, and replicas that it hands connections to."""
