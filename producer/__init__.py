"""For submitters: submit, stream, resume, abort."""
