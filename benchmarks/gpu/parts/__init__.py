"""One module a part: ``run(place, findings)`` measures, writes what it finds, and says whether there is more to do."""
