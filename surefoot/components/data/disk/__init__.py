"""Samples on disk: images written as tars, copies on faster storage, and measured read speed."""
