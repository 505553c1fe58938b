"""Expert back ends: a whole expert FFN each, from tokens and routes to the combined output."""
