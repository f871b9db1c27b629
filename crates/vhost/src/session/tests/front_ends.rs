//! The five front ends, each in its own order: QEMU's and libblkio's as recorded; those of Cloud
//! Hypervisor and Firecracker through the library that they use, in the order of their sources;
//! crosvm's by hand, likewise. Versions and marks: the fact sheet of the project.

use std::os::unix::net::UnixStream;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
    VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::connection::{Connection, Received};

const MIB: u64 = 1 << 20;

/// All that QEMU knows, of what is offered.
fn qemu_connects() -> Peer {
    let mut peer = Peer::new();
    let offered = peer.ask(Request::GetFeatures);
    assert_ne!(offered & features::F_PROTOCOL_FEATURES, 0);
    let protocol = peer.ask(Request::GetProtocolFeatures);
    assert_eq!(protocol, features::ALL);
    peer.tell(Request::SetProtocolFeatures, protocol);
    assert_eq!(peer.ask(Request::GetQueueNum), 64);
    assert_eq!(peer.ask(Request::GetMaxMemSlots), 32);
    peer.need_reply = true;
    peer.tell_with(Request::SetBackendReqFd, &[], vec![eventfd()]);
    peer.need_reply = false;
    peer.tell_with(Request::SetOwner, &[], Vec::new());
    peer.ask(Request::GetFeatures);
    for index in 0..4 {
        peer.vring_fd(Request::SetVringCall, index);
        peer.vring_fd(Request::SetVringErr, index);
    }
    peer.get_config(0, 57);
    peer
}

/// The start of the device: `queues` rings are there, all of four are enabled.
fn qemu_starts(peer: &mut Peer, features: u64, inflight: &mut Option<Inflight>, queues: u32) {
    peer.tell(Request::SetFeatures, features);
    peer.ask(Request::GetStatus);
    peer.tell(Request::SetStatus, 0xf);
    let area = *inflight.get_or_insert_with(|| peer.get_inflight(4, 128, 24));
    peer.set_inflight(&area, 24);
    peer.tell(Request::SetFeatures, features);
    peer.need_reply = true;
    peer.add_region(0, 0xa_0000, 0x7f00_0000_0000);
    peer.add_region(0x10_0000, 255 * MIB, 0x7f00_0010_0000);
    peer.need_reply = false;
    for index in 0..queues {
        peer.vring(Request::SetVringNum, index, 128);
        peer.vring(Request::SetVringBase, index, 0);
        peer.tell_with(Request::SetVringAddr, Peer::address(index, 0).as_bytes(), Vec::new());
        peer.vring_fd(Request::SetVringKick, u64::from(index));
        peer.vring_fd(Request::SetVringCall, u64::from(index));
    }
    for index in 0..4 {
        peer.vring(Request::SetVringEnable, index, 1);
    }
    assert_eq!(peer.session.running(), queues as usize);
}

fn qemu_stops(peer: &mut Peer, queues: u32) {
    for index in 0..4 {
        peer.vring(Request::SetVringEnable, index, 0);
    }
    assert_eq!(peer.session.running(), 0);
    for index in 0..queues {
        assert_eq!(peer.get_vring_base(index), 0x1000 + index);
    }
    peer.remove_region(0, 0xa_0000, 0x7f00_0000_0000);
    peer.remove_region(0x10_0000, 255 * MIB, 0x7f00_0010_0000);
    peer.tell(Request::SetStatus, 0);
}

#[test]
fn qemu_with_seabios_and_linux() {
    let mut peer = qemu_connects();
    peer.tell_with(Request::ResetDevice, &[], Vec::new());
    let (bios, linux) = (1 << 32 | 1 << 30 | 0x4, SPLIT);
    let mut inflight = None;
    qemu_starts(&mut peer, bios, &mut inflight, 1);
    qemu_stops(&mut peer, 1);
    qemu_starts(&mut peer, linux, &mut inflight, 4);
    let calls = peer.mock.taken();
    assert_eq!(calls.iter().filter(|call| call.starts_with("start")).count(), 5);
    assert_eq!(calls.iter().filter(|call| *call == "reset").count(), 2);
    // Linux turns its write cache off.
    let mut payload = [32u32, 1, 0].as_bytes().to_vec();
    payload.push(0);
    peer.tell_with(Request::SetConfig, &payload, Vec::new());
    assert_eq!(peer.mock.taken(), ["set_config 32 [0]"]);
    // Migration begins, the log grows, the guest stops.
    for pages in [4096_u64, 8192] {
        peer.done(Request::SetLogBase, [pages, 0].as_bytes(), vec![eventfd()]).unwrap();
    }
    peer.need_reply = true;
    peer.tell(Request::SetFeatures, linux | features::F_LOG_ALL);
    for index in 0..4 {
        peer.tell_with(Request::SetVringAddr, Peer::address(index, 1).as_bytes(), Vec::new());
    }
    peer.need_reply = false;
    assert_eq!(peer.session.running(), 4);
    qemu_stops(&mut peer, 4);
    peer.session.close(&mut peer.mock);
}

#[test]
fn qemu_without_status_resets_by_messages() {
    let mut peer = qemu_connects();
    peer.tell_with(Request::ResetDevice, &[], Vec::new());
    peer.tell_with(Request::ResetOwner, &[], Vec::new());
    qemu_starts(&mut peer, SPLIT, &mut None, 4);
    peer.tell_with(Request::ResetOwner, &[], Vec::new());
    assert_eq!(peer.session.running(), 0);
}

#[test]
fn libblkio() {
    let mut peer = Peer::new();
    let offered = peer.ask(Request::GetFeatures);
    let taken = offered & SPLIT;
    peer.tell(Request::SetFeatures, taken);
    let protocol = peer.ask(Request::GetProtocolFeatures)
        & (features::MQ | features::REPLY_ACK | features::CONFIG | features::CONFIGURE_MEM_SLOTS);
    peer.tell(Request::SetProtocolFeatures, protocol);
    peer.tell_with(Request::SetOwner, &[], Vec::new());
    for _ in 0..3 {
        peer.get_config(0, 60);
    }
    peer.ask(Request::GetQueueNum);
    peer.ask(Request::GetMaxMemSlots);
    peer.need_reply = true;
    // Addresses in the guest are its own; sizes are what it has.
    peer.add_region(0x7f00_0000_0000, 0x4000, 0x7f00_0000_0000);
    peer.mock.taken();
    peer.vring(Request::SetVringNum, 0, 256);
    peer.vring(Request::SetVringBase, 0, 0);
    peer.tell_with(Request::SetVringAddr, Peer::address(0, 0).as_bytes(), Vec::new());
    peer.vring_fd(Request::SetVringKick, 0);
    peer.vring_fd(Request::SetVringCall, 0);
    peer.vring(Request::SetVringEnable, 0, 1);
    peer.add_region(0x7f00_1000_0000, 0x3b10, 0x7f00_1000_0000);
    peer.get_config(0, 60);
    assert_eq!(
        peer.mock.taken(),
        [
            "call 0 given",
            "start 0 size 256 base 0x0",
            "add_region 0x7f0010000000+0x3b10",
            "get_config 0 60"
        ]
    );
}

#[test]
fn crosvm() {
    let mut peer = Peer::new();
    peer.tell_with(Request::SetOwner, &[], Vec::new());
    let taken = peer.ask(Request::GetFeatures) & SPLIT;
    peer.tell(Request::SetFeatures, taken);
    let protocol = peer.ask(Request::GetProtocolFeatures)
        & (features::CONFIG
            | features::MQ
            | features::BACKEND_REQ
            | features::DEVICE_STATE
            | features::REPLY_ACK);
    peer.tell(Request::SetProtocolFeatures, protocol);
    peer.tell_with(Request::SetBackendReqFd, &[], vec![eventfd()]);
    peer.ask(Request::GetQueueNum);
    peer.get_config(0, 60);
    peer.tell(Request::SetFeatures, taken);
    let mut table = [2u32, 0].as_bytes().to_vec();
    for (guest_addr, size) in [(0, 3 << 30), (4 << 30, 1 << 30)] {
        let user_addr = 0x7f00_0000_0000 + guest_addr;
        let region = Region { guest_addr, size, user_addr, mmap_offset: guest_addr };
        table.extend_from_slice(region.as_bytes());
    }
    peer.tell_with(Request::SetMemTable, &table, vec![eventfd(), eventfd()]);
    for index in 0..2 {
        peer.vring(Request::SetVringNum, index, 256);
        peer.tell_with(Request::SetVringAddr, Peer::address(index, 0).as_bytes(), Vec::new());
        peer.vring(Request::SetVringBase, index, 0);
        peer.vring_fd(Request::SetVringCall, u64::from(index));
        peer.vring_fd(Request::SetVringKick, u64::from(index));
        peer.vring(Request::SetVringEnable, index, 1);
    }
    assert_eq!(peer.session.running(), 2);
    // It goes to sleep and is saved.
    for index in 0..2 {
        peer.vring(Request::SetVringEnable, index, 0);
        peer.get_vring_base(index);
    }
    let reply = peer.done(Request::SetDeviceStateFd, &[0; 8], vec![eventfd()]).unwrap();
    assert_eq!(reply.payload(), 0x100u64.as_bytes());
    assert_eq!(peer.ask(Request::CheckDeviceState), 0);
}

/// Serves a front end on the other end of a socket until it leaves; says what was asked of the back
/// end.
fn serve() -> (UnixStream, JoinHandle<Vec<String>>) {
    let (theirs, ours) = UnixStream::pair().expect("a pair of sockets");
    let server = thread::spawn(move || {
        let wake = eventfd();
        let mut connection = Connection::new(ours.into());
        let mut peer = Peer::new();
        let timeout = Duration::from_secs(10);
        loop {
            match connection.receive(std::os::fd::AsFd::as_fd(&wake), timeout, None).expect("sound")
            {
                Received::Message { header, payload, fds } => {
                    let answer = peer.session.handle(&mut peer.mock, &header, &payload, fds);
                    let answer = answer.expect("nothing is wrong");
                    assert_eq!(answer.refused, None);
                    if let Some(reply) = answer.reply {
                        connection.send(&reply, timeout).expect("taken");
                    }
                }
                Received::Closed => {
                    peer.session.close(&mut peer.mock);
                    return peer.mock.taken();
                }
                Received::Woken | Received::Silence => unreachable!(),
            }
        }
    });
    (theirs, server)
}

fn event() -> EventFd {
    EventFd::new(0).expect("an eventfd")
}

fn memory(file: &std::fs::File) -> Vec<VhostUserMemoryRegionInfo> {
    [(0, 0), (4 << 30, MIB)]
        .map(|(guest_phys_addr, mmap_offset)| VhostUserMemoryRegionInfo {
            guest_phys_addr,
            memory_size: MIB,
            userspace_addr: 0x7f00_0000_0000 + guest_phys_addr,
            mmap_offset,
            mmap_handle: std::os::fd::AsRawFd::as_raw_fd(file),
        })
        .to_vec()
}

fn rings(flags: u32, log_addr: Option<u64>) -> VringConfigData {
    VringConfigData {
        queue_max_size: 256,
        queue_size: 256,
        flags,
        desc_table_addr: 0x7f00_0000_1000,
        used_ring_addr: 0x7f00_0000_3000,
        avail_ring_addr: 0x7f00_0000_2000,
        log_addr,
    }
}

fn start(front_end: &mut Frontend, queue: usize) {
    front_end.set_vring_num(queue, 256).unwrap();
    front_end.set_vring_addr(queue, &rings(0, None)).unwrap();
    front_end.set_vring_base(queue, 0).unwrap();
    front_end.set_vring_call(queue, &event()).unwrap();
    front_end.set_vring_kick(queue, &event()).unwrap();
    front_end.set_vring_enable(queue, true).unwrap();
}

#[test]
fn cloud_hypervisor() {
    let (socket, server) = serve();
    let mut front_end = Frontend::from_stream(socket, 64);
    let file = tempfile::tempfile().unwrap();
    front_end.set_owner().unwrap();
    let taken = front_end.get_features().unwrap() & SPLIT;
    let known = VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::LOG_SHMFD
        | VhostUserProtocolFeatures::DEVICE_STATE;
    let protocol = front_end.get_protocol_features().unwrap() & known;
    assert_eq!(protocol, known);
    front_end.set_protocol_features(protocol).unwrap();
    front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert_eq!(front_end.get_queue_num().unwrap(), 64);
    let (_, space) =
        front_end.get_config(0x100, 60, VhostUserConfigFlags::WRITABLE, &[0; 60]).unwrap();
    assert_eq!(space[59], 59);
    front_end.set_features(taken).unwrap();
    front_end.set_mem_table(&memory(&file)).unwrap();
    let asked = VhostUserInflight { num_queues: 2, queue_size: 256, ..Default::default() };
    let (area, area_fd) = front_end.get_inflight_fd(&asked).unwrap();
    assert_eq!(area.mmap_size, 4096);
    front_end.set_inflight_fd(&area, std::os::fd::AsRawFd::as_raw_fd(&area_fd)).unwrap();
    start(&mut front_end, 0);
    start(&mut front_end, 1);
    // Pause, snapshot, resume.
    front_end.set_vring_enable(0, false).unwrap();
    front_end.set_vring_enable(1, false).unwrap();
    let state = front_end.set_device_state_fd(
        VhostTransferStateDirection::SAVE,
        VhostTransferStatePhase::STOPPED,
        file.try_clone().unwrap().into(),
    );
    assert!(state.unwrap().is_none());
    front_end.check_device_state().unwrap();
    front_end.set_vring_enable(0, true).unwrap();
    front_end.set_vring_enable(1, true).unwrap();
    // Memory is plugged in; migration.
    let more = VhostUserMemoryRegionInfo { guest_phys_addr: 8 << 30, ..memory(&file)[0] };
    front_end.add_mem_region(&more).unwrap();
    let log = VhostUserDirtyLogRegion {
        mmap_size: 4096,
        mmap_offset: 0,
        mmap_handle: std::os::fd::AsRawFd::as_raw_fd(&file),
    };
    front_end.set_log_base(0, Some(log)).unwrap();
    front_end.set_features(taken | features::F_LOG_ALL).unwrap();
    front_end.remove_mem_region(&more).unwrap();
    // The guest reboots.
    for queue in 0..2 {
        front_end.set_vring_enable(queue, false).unwrap();
        front_end.get_vring_base(queue).unwrap();
    }
    front_end.reset_owner().unwrap();
    drop(front_end);
    let calls = server.join().unwrap();
    let rings: Vec<&str> =
        calls.iter().map(String::as_str).filter(|c| c.starts_with("st")).collect();
    assert_eq!(
        rings,
        [
            "start 0 size 256 base 0x0",
            "start 1 size 256 base 0x0",
            "stop 0",
            "stop 1",
            "start 0 size 256 base 0x1000",
            "start 1 size 256 base 0x1001",
            "stop 0",
            "stop 1"
        ]
    );
    assert!(calls.contains(&"set_inflight 2 x 256".to_owned()));
}

#[test]
fn firecracker() {
    let (socket, server) = serve();
    let mut front_end = Frontend::from_stream(socket, 1);
    let file = tempfile::tempfile().unwrap();
    front_end.set_owner().unwrap();
    let taken = front_end.get_features().unwrap() & (1 << 32 | 1 << 30 | 1 << 29 | 1 << 9);
    front_end.get_protocol_features().unwrap();
    front_end.set_protocol_features(VhostUserProtocolFeatures::CONFIG).unwrap();
    front_end.set_features(taken).unwrap();
    front_end.get_config(0, 60, VhostUserConfigFlags::WRITABLE, &[0; 60]).unwrap();
    front_end.set_features(taken).unwrap();
    front_end.set_mem_table(&memory(&file)).unwrap();
    start(&mut front_end, 0);
    // A PATCH of the drive.
    front_end.get_config(0, 60, VhostUserConfigFlags::WRITABLE, &[0; 60]).unwrap();
    drop(front_end);
    let calls = server.join().unwrap();
    let tail: Vec<&str> = calls.iter().map(String::as_str).skip(3).collect();
    assert_eq!(
        tail,
        [
            "set_memory 2",
            "call 0 given",
            "start 0 size 256 base 0x0",
            "get_config 0 60",
            "stop 0",
            "disconnect"
        ]
    );
}

#[test]
fn what_was_refused_reaches_a_front_end_that_asks() {
    let (theirs, ours) = UnixStream::pair().unwrap();
    let server = thread::spawn(move || {
        let wake = eventfd();
        let mut connection = Connection::new(ours.into());
        let mut peer = Peer::new();
        let timeout = Duration::from_secs(10);
        let mut refusals = Vec::new();
        while let Received::Message { header, payload, fds } =
            connection.receive(std::os::fd::AsFd::as_fd(&wake), timeout, None).unwrap()
        {
            let answer = peer.session.handle(&mut peer.mock, &header, &payload, fds).unwrap();
            refusals.extend(answer.refused);
            answer.reply.iter().for_each(|reply| connection.send(reply, timeout).unwrap());
        }
        refusals
    });
    let mut front_end = Frontend::from_stream(theirs, 64);
    front_end.get_features().unwrap();
    front_end.get_protocol_features().unwrap();
    front_end.set_protocol_features(VhostUserProtocolFeatures::REPLY_ACK).unwrap();
    front_end.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert!(front_end.set_vring_num(0, 1025).is_err());
    front_end.set_vring_num(0, 1024).unwrap();
    drop(front_end);
    let refusals = server.join().unwrap();
    assert_eq!(refusals, ["SET_VRING_NUM: size 1025, 1 to 1024 are possible"]);
}
