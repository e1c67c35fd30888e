"""Site of the documents: sources for MkDocs, with generated reference pages and figures."""
