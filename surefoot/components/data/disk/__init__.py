"""Data on disk: images converted to tars, copies on faster storage, and measured read speed."""
