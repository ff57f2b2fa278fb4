"""How a run goes on in a thread, a process or several, waits for its device, is found dead and taken up again."""
