"""Correct implementations with one real fault planted in each. Only the self-test and the tests know them."""
