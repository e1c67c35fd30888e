"""Where it lives: how many bytes go where, and the pools of recurrent states."""
