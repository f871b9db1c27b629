//! A front end in words, for the tests of sessions.

mod front_ends;
mod hand_over;
mod hostile;
mod mock;
mod rings;

use std::os::fd::OwnedFd;

use mock::{Mock, eventfd};
use zerocopy::{FromBytes, IntoBytes};

use super::*;
use crate::protocol::{Inflight, Region, SingleRegion, VringAddress, VringState};

/// What a block device offers here; the bits of the device mean nothing to a session.
const DEVICE: u64 = 1 << 32 | 1 << 34 | 1 << 28 | 1 << 29 | 0x7644;
/// What a driver takes of it for split rings, with F_PROTOCOL_FEATURES.
const SPLIT: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 0x7644;

fn config() -> SessionConfig {
    SessionConfig {
        features: DEVICE,
        protocol_features: features::ALL,
        queues_max: 64,
        queue_size_max: 1024,
        mem_slots_max: 32,
    }
}

impl Mock {
    /// What was asked since the last look.
    fn taken(&mut self) -> Vec<String> {
        std::mem::take(&mut self.calls)
    }
}

struct Peer {
    session: Session,
    mock: Mock,
    /// Each message asks for an answer.
    need_reply: bool,
}

impl Peer {
    fn new() -> Peer {
        let mock = Mock { config: (0..60).collect(), ..Mock::default() };
        Peer { session: Session::new(config()), mock, need_reply: false }
    }

    /// One that took all protocol features.
    fn negotiated() -> Peer {
        let mut peer = Peer::new();
        peer.tell(Request::SetProtocolFeatures, features::ALL);
        peer.tell(Request::SetFeatures, SPLIT);
        peer.mock.taken();
        peer
    }

    /// One with memory.
    fn with_memory() -> Peer {
        let mut peer = Peer::negotiated();
        peer.add_region(0, 0x10_0000, 0x7f00_0000_0000);
        peer.mock.taken();
        peer
    }

    fn handle(
        &mut self,
        request: Request,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Answer, Error> {
        let size = u32::try_from(payload.len()).expect("small");
        let header = Header::request(request as u32, size, self.need_reply);
        self.session.handle(&mut self.mock, &header, payload, fds)
    }

    /// A message that must be done.
    fn done(&mut self, request: Request, payload: &[u8], fds: Vec<OwnedFd>) -> Option<Reply> {
        let answer = self.handle(request, payload, fds);
        let answer = answer.unwrap_or_else(|error| panic!("{}: {error}", request.name()));
        assert_eq!(answer.refused, None);
        answer.reply
    }

    /// A message with one number, without an answer of its own.
    fn tell(&mut self, request: Request, number: u64) {
        self.tell_with(request, number.as_bytes(), Vec::new());
    }

    fn tell_with(&mut self, request: Request, payload: &[u8], fds: Vec<OwnedFd>) {
        let acknowledge = self.need_reply && self.session.negotiated(features::REPLY_ACK);
        let reply = self.done(request, payload, fds);
        let payload = reply.as_ref().map(Reply::payload);
        assert_eq!(payload, acknowledge.then_some([0; 8].as_slice()));
    }

    /// A question that is answered by a number.
    fn ask(&mut self, request: Request) -> u64 {
        let reply = self.done(request, &[], Vec::new()).expect("a reply");
        u64::read_from_bytes(reply.payload()).expect("a number")
    }

    fn get_config(&mut self, offset: u32, size: u32) -> Vec<u8> {
        let mut payload = [offset, size, 0].as_bytes().to_vec();
        payload.resize(12 + size as usize, 0);
        let reply = self.done(Request::GetConfig, &payload, Vec::new()).expect("a reply");
        assert_eq!(reply.payload()[..12], payload[..12]);
        reply.payload()[12..].to_vec()
    }

    fn add_region(&mut self, guest_addr: u64, size: u64, user_addr: u64) {
        let region = Region { guest_addr, size, user_addr, mmap_offset: 0 };
        let payload = SingleRegion { padding: 0, region };
        self.tell_with(Request::AddMemReg, payload.as_bytes(), vec![eventfd()]);
    }

    fn remove_region(&mut self, guest_addr: u64, size: u64, user_addr: u64) {
        let region = Region { guest_addr, size, user_addr, mmap_offset: 0 };
        let payload = SingleRegion { padding: 0, region };
        self.tell_with(Request::RemMemReg, payload.as_bytes(), Vec::new());
    }

    fn vring(&mut self, request: Request, index: u32, num: u32) {
        self.tell_with(request, VringState { index, num }.as_bytes(), Vec::new());
    }

    fn address(index: u32, flags: u32) -> VringAddress {
        let base = 0x7f00_0000_1000 + 0x4000 * u64::from(index);
        VringAddress {
            index,
            flags,
            descriptor: base,
            available: base + 0x1000,
            used: base + 0x2000,
            log: 0x3000,
        }
    }

    fn vring_fd(&mut self, request: Request, index: u64) {
        self.tell_with(request, index.as_bytes(), vec![eventfd()]);
    }

    /// NUM, BASE, ADDR, KICK.
    fn set_up(&mut self, index: u32, size: u32) {
        self.vring(Request::SetVringNum, index, size);
        self.vring(Request::SetVringBase, index, 0);
        self.tell_with(Request::SetVringAddr, Peer::address(index, 0).as_bytes(), Vec::new());
        self.vring_fd(Request::SetVringKick, u64::from(index));
    }

    fn get_vring_base(&mut self, index: u32) -> u32 {
        let state = VringState { index, num: 0 };
        let reply = self.done(Request::GetVringBase, state.as_bytes(), Vec::new());
        let reply = VringState::read_from_bytes(reply.expect("a reply").payload()).expect("sized");
        assert_eq!(reply.index, index);
        reply.num
    }

    fn get_inflight(&mut self, num_queues: u16, queue_size: u16, bytes: usize) -> Inflight {
        let asked = Inflight { num_queues, queue_size, ..Inflight::default() };
        let reply = self.done(Request::GetInflightFd, &asked.as_bytes()[..bytes], Vec::new());
        let reply = reply.expect("a reply");
        assert_eq!((reply.payload().len(), reply.fds().len()), (bytes, 1));
        let mut whole = [0; 24];
        whole[..bytes].copy_from_slice(reply.payload());
        zerocopy::transmute!(whole)
    }

    fn set_inflight(&mut self, inflight: &Inflight, bytes: usize) {
        let payload = &inflight.as_bytes()[..bytes];
        self.tell_with(Request::SetInflightFd, payload, vec![eventfd()]);
    }

    /// A message that must not be done; why, whether the connection ends or not.
    fn refused(&mut self, request: Request, payload: &[u8], fds: Vec<OwnedFd>) -> String {
        match self.handle(request, payload, fds) {
            Ok(answer) => answer.refused.expect("refused"),
            Err(error) => error.to_string(),
        }
    }
}
