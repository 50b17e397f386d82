"""`moetool bench`: what a model takes and gives when it runs, by itself or beside another."""
