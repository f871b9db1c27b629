//! The clients that use the disks of an export now, for people.
//!
//! Promises: a client is listed from the end of its handshake to the end of its connection. The
//! lock is taken there and when the list is read, never by a request.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ringdisk_disk::Events;
use rustix::net::SocketAddrAny;
use rustix::net::sockopt::socket_peercred;

/// One client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The name of the disk that it uses.
    pub export: String,
    /// Its address, of a client over TCP.
    pub address: Option<String>,
    /// Its process, of a client over a Unix socket. As seen from the serving process.
    pub pid: Option<u32>,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.address, self.pid) {
            (Some(address), _) => write!(f, "the client at {address}"),
            (None, Some(pid)) => write!(f, "the client in process {pid}"),
            (None, None) => f.write_str("a client"),
        }
    }
}

/// All clients.
#[derive(Debug, Default)]
pub(crate) struct Peers(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    next: u64,
    /// Disks whose clients another process has: they do not go.
    moved: Vec<String>,
    peers: BTreeMap<u64, Peer>,
}

impl Peers {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The clients now.
    pub(crate) fn list(&self) -> Vec<Peer> {
        self.lock().peers.values().cloned().collect()
    }

    /// Another process has the clients of a disk from now on.
    pub(crate) fn have_moved(&self, export: &str) {
        self.lock().moved.push(export.to_owned());
    }

    /// Lists a client until the guard is dropped.
    ///
    /// * `export`: name of the disk that it uses.
    /// * `address`: of a client over TCP, as it was accepted.
    /// * `events`: of the disk, are told.
    pub(crate) fn enter(
        self: &Arc<Peers>,
        export: &str,
        address: Option<String>,
        socket: impl AsFd,
        events: Arc<Events>,
    ) -> Listed {
        let pid = match address {
            Some(_) => None,
            None => socket_peercred(socket).ok().map(|peer| peer.pid.as_raw_nonzero().get()),
        };
        let pid = pid.and_then(|pid| u32::try_from(pid).ok());
        let mut list = self.lock();
        let number = list.next;
        list.next += 1;
        let peer = Peer { export: export.to_owned(), address, pid };
        let listed = Listed {
            peers: Arc::clone(self),
            number,
            disk: log_name(export),
            name: peer.to_string(),
            events,
        };
        list.peers.insert(number, peer);
        drop(list);
        listed.report("client-came", "has connected");
        listed
    }
}

/// An address of TCP. `None`: of another kind.
pub(crate) fn address_of(address: SocketAddrAny) -> Option<String> {
    std::net::SocketAddr::try_from(address).ok().map(|address| address.to_string())
}

/// A client that is listed.
#[derive(Debug)]
pub(crate) struct Listed {
    peers: Arc<Peers>,
    number: u64,
    /// The name of its disk in the log.
    disk: String,
    name: String,
    events: Arc<Events>,
}

impl Listed {
    fn report(&self, event: &'static str, what: &str) {
        let Listed { disk, name, .. } = self;
        tracing::info!(disk, event, "{disk}: {name} {what}");
        self.events.emit(event, format!("{name} {what}"));
    }
}

/// The name of an export in the log.
pub(crate) fn log_name(export: &str) -> String {
    format!("NBD export '{}'", export.escape_debug())
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut list = self.peers.lock();
        let peer = list.peers.remove(&self.number);
        let has_moved = peer.is_some_and(|peer| list.moved.contains(&peer.export));
        drop(list);
        if !has_moved {
            self.report("client-gone", "has gone");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn clients_are_listed_until_they_go() {
        let (peers, events) = (Arc::new(Peers::default()), Arc::new(Events::default()));
        let (ours, _theirs) = UnixStream::pair().expect("a pair");
        let here = peers.enter("a", None, &ours, Arc::clone(&events));
        let address = Some(String::from("192.0.2.1:5000"));
        let there = peers.enter("b", address.clone(), &ours, Arc::clone(&events));
        let pid = Some(std::process::id());
        let first = Peer { export: String::from("a"), address: None, pid };
        let second = Peer { export: String::from("b"), address, pid: None };
        assert_eq!(peers.list(), [first, second.clone()]);
        drop(here);
        assert_eq!(peers.list(), [second]);
        drop(there);
        assert!(peers.list().is_empty());
        // Another process has one, which has not gone.
        let moved = peers.enter("c", None, &ours, Arc::clone(&events));
        peers.have_moved("c");
        drop(moved);
        let told: Vec<&str> = events.read(0, 9).events.iter().map(|event| event.kind).collect();
        let gone = ["client-came", "client-came", "client-gone", "client-gone", "client-came"];
        assert_eq!(told, gone);
    }
}
