//! The front end's side of the socket: messages as plain bytes.
//!
//! Promises: shares no code with the device: numbers and layouts are written down once more. A
//! device that does not answer fails the test after a limit.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::{TIMEOUT, ask};
use crate::process::{patient, until};

const HEADER_BYTES: usize = 12;
const NEED_REPLY: u32 = 1 << 3;
const REPLY: u32 = 1 << 2;

/// Why a message was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The device said so: a number that is not 0.
    Number(u64),
    /// It closed the connection.
    Gone,
}

/// Numbers as a payload.
#[must_use]
pub fn words(numbers: &[u64]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// The number in a payload of 8 bytes.
#[must_use]
pub fn number(payload: &[u8]) -> u64 {
    u64::from_ne_bytes(payload.try_into().expect("a reply of 8 bytes"))
}

fn halves(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// A front end.
#[derive(Debug)]
pub struct FrontEnd {
    socket: UnixStream,
    /// REPLY_ACK was negotiated: each message asks for an answer.
    pub acks: bool,
}

impl FrontEnd {
    /// Connects to a socket as soon as a process listens there.
    #[must_use]
    pub fn connect(path: &Path) -> FrontEnd {
        let stream = until(TIMEOUT, || UnixStream::connect(path).ok());
        FrontEnd::on(stream.unwrap_or_else(|| panic!("nobody listens at {}", path.display())))
    }

    /// Speaks through a socket that is connected.
    #[must_use]
    pub fn on(socket: UnixStream) -> FrontEnd {
        socket.set_read_timeout(Some(patient(TIMEOUT))).expect("a timeout");
        socket.set_write_timeout(Some(patient(TIMEOUT))).expect("a timeout");
        FrontEnd { socket, acks: false }
    }

    /// The socket, to write anything to.
    pub fn socket(&mut self) -> &mut UnixStream {
        &mut self.socket
    }

    /// Sends a message. Gives whether it could be.
    pub fn send(
        &mut self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> bool {
        let size = u32::try_from(payload.len()).expect("a payload");
        let mut bytes = halves(&[request, 1 | flags, size]);
        bytes.extend_from_slice(payload);
        self.send_raw(&bytes, fds)
    }

    /// Sends bytes, whatever they are.
    pub fn send_raw(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "too many descriptors");
        }
        let slices = [IoSlice::new(bytes)];
        match retry_on_intr(|| sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL)) {
            Ok(sent) => self.socket.write_all(&bytes[sent..]).is_ok(),
            Err(_) => false,
        }
    }

    /// Waits for the reply to a request: payload and descriptors.
    ///
    /// Errors: the connection is at its end.
    pub fn reply(&mut self, request: u32) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
        let mut header = [0; HEADER_BYTES];
        let mut fds = Vec::new();
        let mut done = 0;
        while done < HEADER_BYTES {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slices = [IoSliceMut::new(&mut header[done..])];
            // Late work of a ring of this thread interrupts, too.
            let got = retry_on_intr(|| {
                recvmsg(&self.socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC)
            });
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            match got {
                Ok(got) if got.bytes > 0 => done += got.bytes,
                Err(rustix::io::Errno::AGAIN) => panic!("no reply to message {request}"),
                Ok(_) | Err(_) => return Err(Refused::Gone),
            }
        }
        let word =
            |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().expect("four bytes"));
        assert_eq!(word(0), request, "the reply is to another message");
        assert_eq!(word(4), 1 | REPLY, "flags of the reply to {request}");
        let mut payload = vec![0; usize::try_from(word(8)).expect("64 bits")];
        self.socket.read_exact(&mut payload).map_err(|_| Refused::Gone)?;
        Ok((payload, fds))
    }

    /// Sends a message that has a reply of its own.
    ///
    /// Errors: the connection was closed.
    pub fn ask(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Vec<u8>, Vec<OwnedFd>), Refused> {
        if !self.send(request, 0, payload, fds) {
            return Err(Refused::Gone);
        }
        self.reply(request)
    }

    /// Sends a message that has none; with REPLY_ACK its answer is waited for.
    ///
    /// Errors: it was refused.
    pub fn tell(
        &mut self,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Refused> {
        let flags = if self.acks { NEED_REPLY } else { 0 };
        if !self.send(request, flags, payload, fds) {
            return Err(Refused::Gone);
        }
        if !self.acks {
            return Ok(());
        }
        match number(&self.reply(request)?.0) {
            0 => Ok(()),
            code => Err(Refused::Number(code)),
        }
    }

    /// A message of one number.
    ///
    /// Errors: it was refused.
    pub fn set(&mut self, request: u32, value: u64) -> Result<(), Refused> {
        self.tell(request, &words(&[value]), &[])
    }

    /// A message whose reply is a number.
    ///
    /// Errors: the connection was closed.
    pub fn get(&mut self, request: u32) -> Result<u64, Refused> {
        Ok(number(&self.ask(request, &[], &[])?.0))
    }

    /// A message about a virtqueue: its index and a number.
    ///
    /// Errors: it was refused.
    pub fn vring(&mut self, request: u32, index: u32, value: u32) -> Result<(), Refused> {
        self.tell(request, &halves(&[index, value]), &[])
    }

    /// SET_VRING_ADDR.
    ///
    /// * `log`: address of the used ring in the log, if writes to it are logged.
    ///
    /// Errors: it was refused.
    pub fn vring_addr(
        &mut self,
        index: u32,
        [descriptors, driver, device]: [u64; 3],
        log: Option<u64>,
    ) -> Result<(), Refused> {
        let mut payload = halves(&[index, u32::from(log.is_some())]);
        payload.extend(words(&[descriptors, device, driver, log.unwrap_or(0)]));
        self.tell(ask::SET_VRING_ADDR, &payload, &[])
    }

    /// SET_VRING_KICK, _CALL or _ERR.
    ///
    /// Errors: it was refused.
    pub fn vring_fd(
        &mut self,
        request: u32,
        index: u64,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(), Refused> {
        let none = u64::from(fd.is_none()) << 8;
        let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
        self.tell(request, &words(&[index | none]), &fds)
    }

    /// GET_VRING_BASE: stops a virtqueue.
    ///
    /// Errors: the connection was closed.
    pub fn vring_base(&mut self, index: u32) -> Result<u32, Refused> {
        let (payload, _) = self.ask(ask::GET_VRING_BASE, &halves(&[index, 0]), &[])?;
        let bytes = payload[4..8].try_into().expect("8 bytes");
        Ok(u32::from_ne_bytes(bytes))
    }

    /// ADD_MEM_REG.
    ///
    /// Errors: it was refused.
    pub fn add_region(
        &mut self,
        [guest, size, user, offset]: [u64; 4],
        fd: BorrowedFd<'_>,
    ) -> Result<(), Refused> {
        self.tell(ask::ADD_MEM_REG, &words(&[0, guest, size, user, offset]), &[fd])
    }

    /// REM_MEM_REG.
    ///
    /// Errors: it was refused.
    pub fn remove_region(&mut self, [guest, size, user, offset]: [u64; 4]) -> Result<(), Refused> {
        self.tell(ask::REM_MEM_REG, &words(&[0, guest, size, user, offset]), &[])
    }

    /// SET_MEM_TABLE.
    ///
    /// Errors: it was refused.
    pub fn memory_table(
        &mut self,
        regions: &[[u64; 4]],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), Refused> {
        let mut payload = words(&[regions.len() as u64]);
        regions.iter().for_each(|region| payload.extend(words(region)));
        self.tell(ask::SET_MEM_TABLE, &payload, fds)
    }

    /// GET_CONFIG.
    ///
    /// Errors: it was refused by a reply without payload (`Number(1)`), or the connection was
    /// closed.
    pub fn config(&mut self, offset: u32, len: u32) -> Result<Vec<u8>, Refused> {
        let mut payload = halves(&[offset, len, 0]);
        payload.resize(payload.len() + usize::try_from(len).expect("64 bits"), 0);
        let (payload, _) = self.ask(ask::GET_CONFIG, &payload, &[])?;
        if payload.is_empty() { Err(Refused::Number(1)) } else { Ok(payload[12..].to_vec()) }
    }

    /// SET_CONFIG.
    ///
    /// Errors: it was refused.
    pub fn set_config(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Refused> {
        let len = u32::try_from(bytes.len()).expect("few bytes");
        let mut payload = halves(&[offset, len, 0]);
        payload.extend_from_slice(bytes);
        self.tell(ask::SET_CONFIG, &payload, &[])
    }

    /// Waits until the device closes the connection.
    pub fn expect_end(&mut self) {
        let mut byte = [0; 512];
        loop {
            match self.socket.read(&mut byte) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    panic!("the connection was not closed")
                }
                Err(_) => return,
            }
        }
    }
}

impl AsFd for FrontEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
