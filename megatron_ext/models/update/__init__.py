"""New weights for a model that is there: by the names of the format that it was loaded from, all or nothing."""
