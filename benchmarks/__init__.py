"""Speed, measured: reports, never gates."""
