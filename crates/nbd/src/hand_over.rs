//! The hand-over of an export to a successor process: words, and descriptors in a fixed order.
//!
//! Promises: the predecessor reads and sends nothing once it has given the state; a state that does
//! not hold together is refused as a whole, before the predecessor has given anything up. The
//! predecessor was confined, and may have been taken over: its descriptors are sockets of the kinds
//! that are wanted, and its words decide about the clients' own connections only. Control path.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use ringdisk_disk::HandOver;
use ringdisk_export::{Error, ErrorKind, HandOverState};
use ringdisk_messages::state::Versions;
use ringdisk_nbd_protocol::request::{EXTENDED_BYTES, Style};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SocketType, getpeername, sockopt};
use serde::{Deserialize, Serialize};

use crate::input_buffer::INPUT_BYTES;
use crate::session::LARGE_BYTES_MAX;
use crate::suspended_connections::{Before, Moved};

/// Of the description.
const VERSIONS: Versions = Versions::new(1, 1);
/// Unread bytes of a connection at most: a request whose payload was read straight into its slot,
/// or those in the buffer.
const UNREAD_BYTES_MAX: usize = EXTENDED_BYTES + LARGE_BYTES_MAX + INPUT_BYTES;
/// Those of all connections.
const ALL_UNREAD_BYTES_MAX: usize = 1 << 30;

/// The description. Descriptors come in the order of the fields; the last one is memory with all
/// unread bytes.
#[derive(Debug, Default, Deserialize, Serialize)]
struct Words {
    listeners: usize,
    disks: Vec<DiskWords>,
    clients: Vec<ClientWords>,
    /// As [`Handed::names`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    names: Vec<String>,
}

#[derive(Debug, Deserialize, Serialize)]
struct DiskWords {
    name: String,
    /// As [`HandOver::description`].
    disk: String,
    files: usize,
}

#[derive(Debug, Deserialize, Serialize)]
struct ClientWords {
    export: String,
    #[serde(with = "StyleWord")]
    style: Style,
    contexts: Vec<String>,
    /// Bytes.
    unread: usize,
}

/// The words for a [`Style`], whose crate knows no serde.
#[derive(Deserialize, Serialize)]
#[serde(remote = "Style", rename_all = "kebab-case")]
enum StyleWord {
    Simple,
    Structured,
    Extended,
}

/// An export as another process has handed it over.
#[derive(Debug)]
pub struct Handed {
    /// Name and state of each disk.
    pub disks: Vec<(String, HandOver)>,
    /// Names of all disks of the export, where another one is in charge of them
    /// ([`NbdOptions::beside_another`](crate::NbdOptions)) and hands each over by itself.
    pub names: Vec<String>,
    /// Listening sockets.
    pub listeners: Vec<OwnedFd>,
    /// Connections in their transmission phase.
    pub clients: HandedClients,
}

/// Connections that another process has served.
#[derive(Debug, Default)]
pub struct HandedClients(pub(crate) Vec<HandedClient>);

impl HandedClients {
    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Adds those of another state.
    pub fn extend(&mut self, more: HandedClients) {
        self.0.extend(more.0);
    }
}

/// One of them.
#[derive(Debug)]
pub(crate) struct HandedClient {
    pub(crate) socket: OwnedFd,
    /// Of a client over TCP.
    pub(crate) address: Option<String>,
    pub(crate) before: Before,
}

/// Puts the state of an export together.
///
/// * `disks`: those that are handed over with it.
/// * `names`: as [`Handed::names`].
///
/// Errors: memory is short.
pub(crate) fn pack(
    listeners: Vec<OwnedFd>,
    disks: Vec<(String, HandOver)>,
    names: Vec<String>,
    clients: Vec<Moved>,
) -> Result<HandOverState, Error> {
    let cannot = |error: io::Error| {
        Error::new(ErrorKind::System, "the export cannot be described").source(error)
    };
    let unread: usize = clients.iter().map(|client| client.before.unread.len()).sum();
    if unread > ALL_UNREAD_BYTES_MAX {
        let text = "clients are in the middle of too many large writes; try it again in a moment";
        return Err(Error::new(ErrorKind::Refused, text));
    }
    let mut words = Words { listeners: listeners.len(), names, ..Words::default() };
    let mut fds = listeners;
    for (name, HandOver { description: disk, fds: files }) in disks {
        words.disks.push(DiskWords { name, disk, files: files.len() });
        fds.extend(files);
    }
    let memory = memfd_create(c"ringdisk-unread", MemfdFlags::CLOEXEC);
    let mut memory = File::from(memory.map_err(|errno| cannot(errno.into()))?);
    for Moved { socket, before } in clients {
        let Before { export, style, contexts, unread } = before;
        memory.write_all(&unread).map_err(cannot)?;
        let unread = unread.len();
        words.clients.push(ClientWords { export, style, contexts, unread });
        fds.push(socket);
    }
    fds.push(memory.into());
    let description = VERSIONS.to_text(&words).map_err(cannot)?;
    Ok(HandOverState { description, fds })
}

impl Words {
    /// How many descriptors they name. `None`: no number.
    fn descriptors(&self) -> Option<usize> {
        let files = self.disks.iter().map(|disk| disk.files);
        let others = [self.listeners, self.clients.len(), 1];
        files.chain(others).try_fold(0, usize::checked_add)
    }

    /// Whether that is memory with the bytes of all clients, and they are not too many. Others of
    /// what has a descriptor could be read for ever.
    fn unread_is_all_of(&self, memory: &File) -> bool {
        let mut each = self.clients.iter().map(|client| client.unread);
        let unread = each.try_fold(0, usize::checked_add);
        let meta = memory.metadata().ok().filter(std::fs::Metadata::is_file);
        let has = meta.and_then(|meta| usize::try_from(meta.len()).ok());
        unread.is_some_and(|unread| unread <= ALL_UNREAD_BYTES_MAX) && unread == has
    }
}

impl Handed {
    /// Opens a state.
    ///
    /// Errors: it is of another version, or does not hold together.
    pub fn open(state: HandOverState) -> Result<Handed, Error> {
        let refused = |why: String| {
            let text = format!("the state of the export is not understood: {why}");
            Error::new(ErrorKind::Refused, text)
        };
        let mut words: Words =
            VERSIONS.from_text(state.description.as_bytes()).map_err(|why| refused(why.into()))?;
        let mut fds = state.fds.into_iter();
        let came = fds.len();
        if words.descriptors() != Some(came) {
            return Err(refused(format!("{came} descriptors came, and it names others")));
        }
        let listeners: Vec<OwnedFd> = fds.by_ref().take(words.listeners).collect();
        if !listeners.iter().all(|socket| is_stream(socket, true)) {
            return Err(refused(String::from("a descriptor is no listening socket")));
        }
        let disk = |DiskWords { name, disk: description, files }: DiskWords| {
            let fds = fds.by_ref().take(files).collect();
            (name, HandOver { description, fds })
        };
        let disks = std::mem::take(&mut words.disks).into_iter().map(disk).collect();
        let sockets: Vec<OwnedFd> = fds.by_ref().take(words.clients.len()).collect();
        if !sockets.iter().all(|socket| is_stream(socket, false)) {
            return Err(refused(String::from("a descriptor is no connection")));
        }
        let mut memory = fds.next().map(File::from).ok_or_else(|| refused(String::new()))?;
        if !words.unread_is_all_of(&memory) {
            return Err(refused(String::from("its memory does not hold the bytes of clients")));
        }
        let rewound = memory.seek(SeekFrom::Start(0));
        rewound.map_err(|error| refused(format!("its memory cannot be read: {error}")))?;
        let mut clients = Vec::new();
        for (words, socket) in std::mem::take(&mut words.clients).into_iter().zip(sockets) {
            let ClientWords { export, style, contexts, unread } = words;
            if unread > UNREAD_BYTES_MAX {
                return Err(refused(format!("{unread} unread bytes of a client")));
            }
            let mut bytes = vec![0; unread];
            let read = memory.read_exact(&mut bytes);
            read.map_err(|error| refused(format!("bytes of clients are missing: {error}")))?;
            let before = Before { export, style, contexts, unread: bytes };
            clients.push(HandedClient { address: address_of(&socket), socket, before });
        }
        let names = std::mem::take(&mut words.names);
        Ok(Handed { disks, names, listeners, clients: HandedClients(clients) })
    }
}

/// Whether it is a stream socket, and a listening one or not.
fn is_stream(socket: impl AsFd, listens: bool) -> bool {
    sockopt::socket_type(&socket) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(&socket) == Ok(listens)
}

/// The address of a client over TCP.
fn address_of(socket: &OwnedFd) -> Option<String> {
    let address = getpeername(socket).ok().flatten()?;
    SocketAddr::try_from(address).ok().map(|address| address.to_string())
}

#[cfg(test)]
mod tests;
