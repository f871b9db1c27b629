//! Tells a service manager how we are.
//!
//! Promises: never fails and never blocks for long; without `NOTIFY_SOCKET` nothing is done.
//! Source: the datagram protocol of sd_notify(3): newline-separated assignments.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The service manager, if one listens.
#[derive(Debug)]
pub(crate) struct Notify {
    target: Option<(UnixDatagram, SocketAddr)>,
}

impl Notify {
    /// Takes the socket's name from the environment.
    pub(crate) fn from_environment() -> Notify {
        Notify::to(std::env::var_os("NOTIFY_SOCKET").as_deref())
    }

    /// * `name`: a path, or `@` and an abstract name; `None` and other kinds: nobody listens.
    fn to(name: Option<&OsStr>) -> Notify {
        let target = name.and_then(address).and_then(|address| {
            let socket = UnixDatagram::unbound().ok()?;
            // A full queue must not hold up the start or the end of a mount.
            socket.set_nonblocking(true).ok()?;
            Some((socket, address))
        });
        Notify { target }
    }

    /// We serve: requests are answered from now on.
    pub(crate) fn ready(&self, status: &str) {
        // The main process is ours also when a parent started us in the background.
        self.send(&format!("READY=1\nMAINPID={}\nSTATUS={}", std::process::id(), one_line(status)));
    }

    /// What we are doing, for people.
    pub(crate) fn status(&self, status: &str) {
        self.send(&format!("STATUS={}", one_line(status)));
    }

    /// We are about to end.
    pub(crate) fn stopping(&self, status: &str) {
        self.send(&format!("STOPPING=1\nSTATUS={}", one_line(status)));
    }

    fn send(&self, message: &str) {
        if let Some((socket, address)) = &self.target
            && let Err(error) = socket.send_to_addr(message.as_bytes(), address)
        {
            tracing::debug!("the service manager was not told: {error}");
        }
    }
}

/// A line break would begin another assignment.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// The address of a socket name.
fn address(name: &OsStr) -> Option<SocketAddr> {
    match name.as_bytes() {
        [b'@', rest @ ..] if !rest.is_empty() => SocketAddr::from_abstract_name(rest).ok(),
        [b'/', ..] => SocketAddr::from_pathname(name).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let len = socket.recv(&mut bytes).expect("a message");
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    }

    #[test]
    fn a_path_socket_hears_ready_and_stopping() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("notify");
        let server = UnixDatagram::bind(&path).expect("bind");
        let notify = Notify::to(Some(path.as_os_str()));
        notify.ready("serving\nEVIL=1");
        notify.stopping("bye");
        let ready = receive(&server);
        assert!(ready.starts_with("READY=1\nMAINPID="), "{ready}");
        assert!(ready.ends_with("STATUS=serving EVIL=1"), "{ready}");
        assert_eq!(receive(&server), "STOPPING=1\nSTATUS=bye");
    }

    #[test]
    fn an_abstract_socket_hears_status() {
        let name = format!("ringdisk-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("address");
        let server = UnixDatagram::bind_addr(&address).expect("bind");
        Notify::to(Some(OsStr::new(&format!("@{name}")))).status("halted");
        assert_eq!(receive(&server), "STATUS=halted");
    }

    #[test]
    fn nobody_and_rubbish_are_ignored() {
        for name in [None, Some(""), Some("@"), Some("vsock:2:1"), Some("/nowhere/socket")] {
            Notify::to(name.map(OsStr::new)).ready("x");
        }
    }
}
