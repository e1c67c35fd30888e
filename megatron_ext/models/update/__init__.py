"""Weight updates of a loaded model: under the names of the format it was loaded from, all or nothing."""
