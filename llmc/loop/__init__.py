"""The closed loop: what a server was asked for, evaluated, planned for, compiled, and swapped in."""
