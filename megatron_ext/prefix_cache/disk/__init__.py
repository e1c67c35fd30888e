"""Cache entries on disk: blocks and snapshots that outlive the process, each verified at every read."""
