"""Expert back ends that are kept for comparison. They are in the search space only if a request names them."""
