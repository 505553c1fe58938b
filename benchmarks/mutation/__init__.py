"""How many mutants of what decides do the tests kill?"""
