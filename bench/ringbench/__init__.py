"""The benchmark of ringdisk: servers side by side, fio as the client, figures against targets."""
