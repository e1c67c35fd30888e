"""Terminal output of the tools: safe printing, tables, progress, and checks of the machine."""
