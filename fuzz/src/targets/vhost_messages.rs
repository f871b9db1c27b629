//! Any messages of a front end: nothing panics, and the back end is only asked for what makes sense
//! (the mock insists on it).

use std::os::fd::OwnedFd;

use mock::{Mock, eventfd};
use ringdisk_vhost::protocol::{Header, Request, features};
use ringdisk_vhost::session::{
    Backend, ConfigWrite, InflightArea, Refusal, RegionSetup, Session, SessionConfig,
    StateDirection, VringSetup,
};

use crate::Input;

#[path = "../../../crates/vhost/src/session/tests/mock.rs"]
mod mock;

/// Most messages of one input.
const MESSAGES_MAX: usize = 256;

fn config(input: &mut Input<'_>) -> SessionConfig {
    SessionConfig {
        features: 1 << 32 | 1 << 34 | 1 << 29,
        protocol_features: if input.byte() % 8 == 0 { input.number(4) } else { features::ALL },
        queues_max: 1 + u16::from(input.byte() % 4),
        queue_size_max: 256,
        mem_slots_max: 1 + u16::from(input.byte() % 4),
    }
}

/// Small numbers, flags and addresses that go together are frequent.
fn word(input: &mut Input<'_>) -> u64 {
    match input.byte() {
        kind @ 0..=127 => u64::from(kind & 3),
        128..=191 => 0x1000 * u64::from(input.byte()),
        192..=207 => 1 << (input.byte() % 64),
        208..=223 => 1 << 32 | 1 << 30 | u64::from(input.byte() % 2) << 34,
        224..=231 => features::ALL,
        232..=239 => 0x100 | u64::from(input.byte() % 4),
        _ => input.number(8),
    }
}

/// A payload of up to `len` bytes in units of four or eight.
fn payload(input: &mut Input<'_>, len: usize) -> Vec<u8> {
    let narrow = input.byte() % 2 == 0;
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let word = word(input).to_ne_bytes();
        bytes.extend_from_slice(if narrow && bytes.len() < 8 { &word[..4] } else { &word });
    }
    bytes.truncate(len);
    bytes
}

fn message(input: &mut Input<'_>) -> (Header, Vec<u8>, Vec<OwnedFd>) {
    const SIZES: [usize; 8] = [0, 8, 8, 8, 16, 24, 40, 40];
    let number = match input.byte() {
        255 => input.number(4) as u32,
        choice => Request::ALL[usize::from(choice) % Request::ALL.len()] as u32,
    };
    let shape = input.byte();
    let len = if shape & 0xe0 == 0xe0 {
        usize::from(input.byte())
    } else {
        SIZES[usize::from(shape & 7)]
    };
    let flags = if shape & 0x18 == 0x18 { input.number(1) as u32 } else { 1 | (shape & 8) as u32 };
    let fds = (0..(shape >> 5) % 3).map(|_| eventfd()).collect();
    let payload = payload(input, len);
    (Header { request: number, flags, size: payload.len() as u32 }, payload, fds)
}

/// A sound front end up to a ring that runs, which random bytes hardly ever reach.
fn begin(session: &mut Session, mock: &mut Mock, packed: bool) {
    let wide =
        |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    let pair = |low: u64, high: u64| wide(&[low | high << 32]);
    let features = 1 << 32 | 1 << 30 | u64::from(packed) << 34;
    let base = if packed { 0x8000_8000 } else { 0 };
    for (request, payload, fd) in [
        (Request::SetProtocolFeatures, wide(&[features::ALL]), false),
        (Request::SetFeatures, wide(&[features]), false),
        (Request::AddMemReg, wide(&[0, 0, 0x10_0000, 0x1000, 0]), true),
        (Request::SetVringNum, pair(0, 8), false),
        (Request::SetVringBase, pair(0, base), false),
        (Request::SetVringAddr, wide(&[0, 0x1000, 0x3000, 0x2000, 0]), false),
        (Request::SetVringKick, wide(&[0]), true),
        (Request::SetVringEnable, pair(0, 1), false),
    ] {
        let header = Header::request(request as u32, payload.len() as u32, false);
        let fds = fd.then(eventfd).into_iter().collect();
        let answer = session.handle(mock, &header, &payload, fds).expect("sound");
        assert_eq!(answer.refused, None);
    }
    assert_eq!(session.running(), 1);
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    let mut input = Input(bytes);
    let mut config = config(&mut input);
    let mut mock = Mock::default();
    let beginning = input.byte() % 4;
    if beginning > 1 {
        config.protocol_features = features::ALL;
    }
    let mut session = Session::new(config);
    if beginning > 1 {
        begin(&mut session, &mut mock, beginning == 3);
    }
    if input.byte() % 4 == 0 {
        mock.refuse
            .insert(["start", "stop", "set_memory", "set_features"][usize::from(input.byte() % 4)]);
    }
    for _ in 0..MESSAGES_MAX {
        if input.is_empty() {
            break;
        }
        let (header, payload, fds) = message(&mut input);
        match session.handle(&mut mock, &header, &payload, fds) {
            Ok(answer) => assert!(answer.reply.is_none_or(|reply| reply.bytes().len() >= 12)),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                session.close(&mut mock);
            }
        }
        assert_eq!(session.running(), mock.running.len());
    }
    session.close(&mut mock);
}
