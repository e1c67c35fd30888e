"""What tools share on a terminal: text that is safe to print, what the engine has room for, checks of the machine."""
