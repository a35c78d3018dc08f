"""One module a part: ``run(place, findings)`` measures and writes what it finds."""
