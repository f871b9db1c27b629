//! Devices `/dev/nbdN` of the kernel, by its generic netlink family `nbd`.
//!
//! Promises: pure messages and one socket; a kernel that says nothing for [`KERNEL_LIMIT`] is an
//! error. Needs CAP_SYS_ADMIN. Sources: netlink(7), `linux/genetlink.h`, `linux/nbd-netlink.h`.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// How long the kernel may take to answer (60 s): it ends requests of a device before it lets go of
/// it.
const KERNEL_LIMIT: Duration = Duration::from_secs(60);
/// Longest answer that is read, bytes. Those of this family have some 100.
const ANSWER_BYTES: usize = 8 << 10;
/// Length of the head of a message (`nlmsghdr`) and of generic netlink (`genlmsghdr`), bytes.
const HEAD_BYTES: usize = 16;
const GENERIC_BYTES: usize = 4;

/// Flags of a message: it is a request, and is to be answered.
const REQUEST_AND_ACKNOWLEDGE: u16 = 1 | 4;
/// Kind of a message that says how a request ended.
const ERROR: u16 = 2;
/// The family that knows the others, its question for one, and the attributes of that.
const CONTROL: u16 = 16;
const GET_FAMILY: u8 = 3;
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;

/// Commands of the family `nbd`.
const CONNECT: u8 = 1;
const DISCONNECT: u8 = 2;
/// Its attributes.
const INDEX: u16 = 1;
const SIZE_BYTES: u16 = 2;
const BLOCK_SIZE_BYTES: u16 = 3;
const TIMEOUT: u16 = 4;
const SERVER_FLAGS: u16 = 5;
const SOCKETS: u16 = 7;
const BACKEND_IDENTIFIER: u16 = 10;
/// In `SOCKETS`: each of them, and its descriptor.
const SOCKET_ITEM: u16 = 1;
const SOCKET_FD: u16 = 1;
/// An attribute that holds others.
const NESTED: u16 = 1 << 15;

/// A device as it is to be.
#[derive(Debug)]
pub(crate) struct Device<'a> {
    /// N of `/dev/nbdN`.
    pub(crate) index: u32,
    /// Size, bytes: a multiple of `block_bytes`.
    pub(crate) size: u64,
    /// Logical blocks, bytes: a power of two, from 512 to a page.
    pub(crate) block_bytes: u64,
    /// Flags of the export, as the server gave them.
    pub(crate) flags: u16,
    /// A request that is not answered for so long loses its connection.
    pub(crate) timeout: Duration,
    /// Shown in `/sys/block/nbdN/backend`.
    pub(crate) backend: &'a str,
}

/// The kernel's side, for devices of NBD.
pub(crate) struct Kernel {
    socket: OwnedFd,
    family: u16,
}

impl Kernel {
    /// Errors: `ENOENT` where the module `nbd` is not there; those of a socket.
    pub(crate) fn open() -> Result<Kernel, Errno> {
        let kind = Some(netlink::GENERIC);
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, kind)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(KERNEL_LIMIT))?;
        let mut kernel = Kernel { socket, family: CONTROL };
        let mut name = Vec::new();
        push(&mut name, FAMILY_NAME, b"nbd\0");
        let answer = kernel.ask(GET_FAMILY, &name)?;
        let id = attributes(&answer).find(|(kind, _)| *kind == FAMILY_ID);
        let id = id.and_then(|(_, value)| value.try_into().ok()).map(u16::from_ne_bytes);
        kernel.family = id.ok_or(Errno::PROTO)?;
        Ok(kernel)
    }

    /// Makes connections to a server, whose handshake is done, those of a device.
    ///
    /// Errors: `EBUSY`: the device has a server; `EPERM`; those of the attributes.
    pub(crate) fn connect<'a>(
        &self,
        device: &Device<'_>,
        sockets: impl IntoIterator<Item = &'a (impl AsRawFd + 'a)>,
    ) -> Result<(), Errno> {
        let mut data = Vec::new();
        push(&mut data, INDEX, &device.index.to_ne_bytes());
        push(&mut data, SIZE_BYTES, &device.size.to_ne_bytes());
        push(&mut data, BLOCK_SIZE_BYTES, &device.block_bytes.to_ne_bytes());
        push(&mut data, TIMEOUT, &device.timeout.as_secs().to_ne_bytes());
        push(&mut data, SERVER_FLAGS, &u64::from(device.flags).to_ne_bytes());
        let mut items = Vec::new();
        for socket in sockets {
            let mut item = Vec::new();
            push(&mut item, SOCKET_FD, &socket.as_raw_fd().to_ne_bytes());
            push(&mut items, SOCKET_ITEM | NESTED, &item);
        }
        push(&mut data, SOCKETS | NESTED, &items);
        push(&mut data, BACKEND_IDENTIFIER, &[device.backend.as_bytes(), b"\0"].concat());
        self.ask(CONNECT, &data).map(drop)
    }

    /// Ends the connections of a device; its requests fail from then on. One without any is left as
    /// it is.
    ///
    /// Errors: `EPERM`; no such device.
    pub(crate) fn disconnect(&self, index: u32) -> Result<(), Errno> {
        let mut data = Vec::new();
        push(&mut data, INDEX, &index.to_ne_bytes());
        self.ask(DISCONNECT, &data).map(drop)
    }

    /// Sends a request and waits until it is done. Gives the attributes of the answer before that.
    fn ask(&self, command: u8, data: &[u8]) -> Result<Vec<u8>, Errno> {
        let len = HEAD_BYTES + GENERIC_BYTES + data.len();
        let mut message = Vec::with_capacity(len);
        message.extend(u32::try_from(len).map_err(|_| Errno::MSGSIZE)?.to_ne_bytes());
        message.extend(self.family.to_ne_bytes());
        message.extend(REQUEST_AND_ACKNOWLEDGE.to_ne_bytes());
        // Number of the request, and of this socket: the kernel gives one.
        message.extend([0; 8]);
        // Version 1 of both families; two bytes for later.
        message.extend([command, 1, 0, 0]);
        message.extend(data);
        send(&self.socket, &message, SendFlags::empty())?;
        let mut answer = Vec::new();
        let mut buffer = vec![0; ANSWER_BYTES];
        loop {
            let (len, _) = recv(&self.socket, &mut buffer[..], RecvFlags::empty())?;
            let mut rest = &buffer[..len];
            while let Some((kind, message, behind)) = next_message(rest) {
                rest = behind;
                if kind != ERROR {
                    answer = message.get(GENERIC_BYTES..).ok_or(Errno::PROTO)?.to_vec();
                    continue;
                }
                let code = message.first_chunk().map(|code| i32::from_ne_bytes(*code));
                return match code.ok_or(Errno::PROTO)? {
                    0 => Ok(answer),
                    code => Err(Errno::from_raw_os_error(code.saturating_neg())),
                };
            }
        }
    }
}

/// Appends an attribute.
fn push(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    to.extend(len.to_ne_bytes());
    to.extend(kind.to_ne_bytes());
    to.extend(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

/// The attributes in `bytes`: their kinds and values.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (head, _) = bytes.split_first_chunk::<4>()?;
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let value = bytes.get(4..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([head[2], head[3]]), value))
    })
}

/// The first message of `bytes`: its kind, what is behind its head, and what is behind it.
fn next_message(bytes: &[u8]) -> Option<(u16, &[u8], &[u8])> {
    let (head, _) = bytes.split_first_chunk::<HEAD_BYTES>()?;
    let len = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
    let message = bytes.get(HEAD_BYTES..len)?;
    let behind = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((u16::from_ne_bytes([head[4], head[5]]), message, behind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_read_as_they_are_written_and_bad_ones_end_the_list() {
        let mut bytes = Vec::new();
        push(&mut bytes, 2, b"nbd\0x");
        push(&mut bytes, 1, &7_u16.to_ne_bytes());
        assert_eq!(bytes.len(), 20);
        let read: Vec<_> = attributes(&bytes).collect();
        assert_eq!(read, [(2, &b"nbd\0x"[..]), (1, &7_u16.to_ne_bytes()[..])]);
        for len in [0_u16, 3, 21] {
            let mut bad = bytes.clone();
            bad[..2].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(attributes(&bad).count(), 0, "{len}");
        }
    }

    #[test]
    fn messages_that_are_cut_off_are_none() {
        let mut bytes = 20_u32.to_ne_bytes().to_vec();
        bytes.extend(ERROR.to_ne_bytes());
        bytes.extend([0; 14]);
        assert_eq!(next_message(&bytes), Some((ERROR, &[0; 4][..], &[][..])));
        for len in 0..20 {
            assert_eq!(next_message(&bytes[..len]), None);
        }
        bytes[0] = 15;
        assert_eq!(next_message(&bytes), None);
    }

    #[test]
    fn the_kernel_knows_its_family_of_families() {
        // As far as a kernel without the module goes.
        match Kernel::open() {
            Ok(kernel) => assert!(kernel.family > CONTROL),
            Err(errno) => assert!([Errno::NOENT, Errno::AFNOSUPPORT].contains(&errno), "{errno}"),
        }
    }
}
