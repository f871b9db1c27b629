//! Servers that break the protocol, stand still, or lie: the requests fail, nothing else happens.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use ringdisk_nbd_protocol::handshake::greeting;
use ringdisk_nbd_protocol::numbers::{chunk, command, errno, option_reply};
use ringdisk_nbd_protocol::options::push_reply;
use ringdisk_nbd_protocol::reply::{Hole, SimpleReply};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_nbd_protocol::status::Extent;
use ringdisk_ring::{Errno, IoBuf};
use ringdisk_storage::{NbdOptions, Storage};

use crate::on_ring;
use crate::server::{
    Act, Offer, Server, address, chunk, data_chunk, done, shake_hands, status_chunk,
};

/// Opens a server that is not expected to let that happen, and gives the message.
fn refused(server: &Server) -> String {
    server.try_open(&NbdOptions::default()).expect_err("refused").to_string()
}

#[test]
fn what_is_no_server_is_refused_with_the_reason() {
    let hello: [(&[u8], &str); 4] = [
        (b"HTTP/1.1 400 Bad Request\r\n", "no NBD server"),
        (b"", "ended the connection"),
        (b"NBDMAGICIHAVEOPT\x00\x00", "an old style"),
        (b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53\x00\x00", "old style"),
    ];
    for (bytes, why) in hello {
        let server = Server::raw(move |_, mut stream| stream.write_all(bytes));
        let message = refused(&server);
        assert!(message.contains(why), "{message}");
    }
    let directory = tempfile::tempdir().unwrap();
    let nothing = address(&directory.path().join("nothing"));
    let error = Storage::open_nbd(&nothing, &NbdOptions::default()).expect_err("nothing there");
    assert!(error.to_string().contains("no server listens"), "{error}");
}

#[test]
fn replies_to_options_that_are_malformed_end_the_handshake() {
    type Reply = fn(&mut Vec<u8>, u32);
    let replies: [(Reply, &str); 6] = [
        (|out, _| out.extend([0; 20]), "magic"),
        (|out, option| push_reply(out, option + 1, option_reply::ACK, &[]), "not sent"),
        (
            |out, option| {
                push_reply(out, option, option_reply::INFO, &[]);
                let len = out.len();
                out[len - 4..].copy_from_slice(&u32::MAX.to_be_bytes());
            },
            "too long",
        ),
        (
            |out, option| {
                (0..100).for_each(|_| push_reply(out, option, option_reply::SERVER, b"x"));
            },
            "endless",
        ),
        (|out, option| push_reply(out, option, option_reply::TLS_REQUIRED, b"no"), "nbds://"),
        (|out, option| push_reply(out, option, option_reply::ACK, &[]), "size of the export"),
    ];
    for (reply, why) in replies {
        let server = Server::raw(move |_, mut stream| {
            stream.write_all(&greeting(3))?;
            stream.read_exact(&mut [0; 4])?;
            loop {
                let mut head = [0; 16];
                stream.read_exact(&mut head)?;
                let number = |at: usize| u32::from_be_bytes(head[at..at + 4].try_into().unwrap());
                let mut data = vec![0; number(12) as usize];
                stream.read_exact(&mut data)?;
                let mut out = Vec::new();
                reply(&mut out, number(8));
                stream.write_all(&out)?;
            }
        });
        let message = refused(&server);
        assert!(message.contains(why), "{why}: {message}");
    }
}

#[test]
fn lies_about_the_size_are_refused() {
    for size in [1 << 63, u64::MAX] {
        let offer = Offer { size, ..Offer::default() };
        let server = Server::raw(move |_, mut stream| shake_hands(&mut stream, &offer).map(drop));
        assert!(refused(&server).contains("larger than any file"));
    }
}

#[test]
fn a_server_that_never_answers_is_given_up_in_time() {
    let server = Server::raw(|_, mut stream| stream.read(&mut [0]).map(drop));
    let began = Instant::now();
    assert!(refused(&server).contains("does not answer in time"));
    assert!(began.elapsed() < Duration::from_secs(20));
}

/// Makes the bytes of a broken answer to a request.
type Break = fn(Style, &Request) -> Vec<u8>;

const fn extent(len: u64) -> Extent {
    Extent { len, flags: 0 }
}

/// Broken answers to a read of 4096 bytes at 8192.
const READS: [(&str, Break); 16] = [
    ("no magic", |_, _| vec![0xff; 64]),
    ("simple", |_, request| {
        let mut out = SimpleReply { error: 0, cookie: request.cookie }.to_bytes().to_vec();
        out.extend([0; 4096]);
        out
    }),
    ("another cookie", |style, request| {
        done(style, &Request { cookie: request.cookie + 1, ..*request })
    }),
    ("a cookie of no slot", |style, request| done(style, &Request { cookie: !0, ..*request })),
    ("no data", done),
    ("too little", |style, request| data_chunk(style, request, 8192, &[1; 4095], true)),
    ("too much", |style, request| data_chunk(style, request, 8192, &[1; 4097], true)),
    ("before", |style, request| data_chunk(style, request, 8191, &[1; 4096], true)),
    ("far away", |style, request| data_chunk(style, request, u64::MAX - 10, &[1; 4096], true)),
    ("empty", |style, request| data_chunk(style, request, 8192, &[], false)),
    ("overlapping", |style, request| {
        let first = data_chunk(style, request, 8192, &[1; 4096], false);
        [first, data_chunk(style, request, 12287, &[2], true)].concat()
    }),
    ("a hole over data", |style, request| {
        let first = data_chunk(style, request, 8192, &[1; 100], false);
        let hole = Hole { offset: 8192, len: 4096 }.to_bytes();
        [first, chunk(style, request, chunk::OFFSET_HOLE, &hole, true)].concat()
    }),
    ("a hole of 4 GiB", |style, request| {
        let hole = Hole { offset: 8192, len: u32::MAX }.to_bytes();
        chunk(style, request, chunk::OFFSET_HOLE, &hole, true)
    }),
    ("status", |style, request| status_chunk(style, request, 7, &[extent(4096)])),
    ("unknown kind", |style, request| chunk(style, request, 77, &[], true)),
    ("nothing, not done", |style, request| chunk(style, request, chunk::NONE, &[], false)),
];

/// Broken answers to a question about 4096 bytes.
const STATUSES: [(&str, Break); 8] = [
    ("none", done),
    ("data", |style, request| data_chunk(style, request, request.offset, &[0; 4096], true)),
    ("another context", |style, request| status_chunk(style, request, 8, &[extent(4096)])),
    ("an empty extent", |style, request| status_chunk(style, request, 7, &[extent(0)])),
    ("past the end", |style, request| {
        status_chunk(style, request, 7, &[extent(1 << 20), extent(1), extent(1)])
    }),
    ("without extents", |style, request| {
        chunk(style, request, chunk::BLOCK_STATUS_EXTENDED, &[0, 0, 0, 7, 0, 0, 0, 0], true)
    }),
    ("cut off", |style, request| {
        chunk(style, request, chunk::BLOCK_STATUS_EXTENDED, &[0, 0, 0, 7, 0, 0, 0, 1, 5], true)
    }),
    ("of 32 bits", |style, request| {
        chunk(style, request, chunk::BLOCK_STATUS, &[0, 0, 0, 7, 0, 0, 16, 0, 0, 0, 0, 0], true)
    }),
];

/// A server that breaks its answers to one command, for ever or once.
fn breaking(command: u16, answer: Break, connections: usize) -> Server {
    Server::scripted(Offer::default(), move |connection, request| {
        if request.command == command && connection < connections {
            Act::Send(answer(Style::Extended, request))
        } else {
            Act::Serve
        }
    })
}

#[test]
fn a_broken_answer_fails_the_request_in_the_end_and_no_memory_but_its_own_is_touched() {
    for (what, answer) in READS {
        let server = breaking(command::READ, answer, usize::MAX);
        let storage = server.open_for(Duration::ZERO);
        on_ring(|ring| async move {
            let memory = IoBuf::new(3 * 4096, 4096);
            memory.fill(0x55);
            let buf = memory.slice(4096..8192);
            let read = storage.read(&ring, 8192, &buf).await;
            assert_eq!(read, Err(Errno::IO), "{what}");
            let bytes = memory.to_vec();
            let untouched = |part: &[u8]| part.iter().all(|byte| *byte == 0x55);
            assert!(untouched(&bytes[..4096]) && untouched(&bytes[8192..]), "{what}");
            // Other commands go on over another connection.
            assert_eq!(storage.flush(&ring).await, Ok(()), "{what}");
        });
    }
}

#[test]
fn a_read_is_repeated_over_a_connection_that_is_not_broken() {
    for (what, answer) in READS {
        let server = breaking(command::READ, answer, 1);
        server.disk.lock().unwrap()[8192..12288].fill(7);
        let storage = server.open();
        on_ring(|ring| async move {
            let buf = IoBuf::new(4096, 4096);
            assert_eq!(storage.read(&ring, 8192, &buf).await, Ok(4096), "{what}");
            assert!(buf.to_vec().iter().all(|byte| *byte == 7), "{what}");
        });
    }
}

#[test]
fn broken_block_status_is_an_error() {
    for (what, answer) in STATUSES {
        let server = breaking(command::BLOCK_STATUS, answer, usize::MAX);
        let storage = server.open_for(Duration::ZERO);
        on_ring(|ring| async move {
            let status = storage.allocation(&ring, 8192, 4096).await;
            assert_eq!(status, Err(Errno::IO), "{what}");
            assert_eq!(storage.flush(&ring).await, Ok(()), "{what}");
        });
    }
}

#[test]
fn a_write_is_not_repeated_after_a_broken_answer() {
    let server = breaking(command::WRITE, |_, _| vec![0xff; 64], usize::MAX);
    let storage = server.open();
    on_ring(|ring| async move {
        let buf = IoBuf::new(4096, 4096);
        assert_eq!(storage.write(&ring, 0, &buf).await, Err(Errno::IO));
    });
    let requests = server.requests.load(std::sync::atomic::Ordering::SeqCst);
    assert_eq!(requests, 1, "the server may still carry the first one out, at any time");
}

#[test]
fn bytes_that_belong_to_no_reply_end_the_connection() {
    let server = Server::scripted(Offer::default(), |connection, request| {
        if request.command == command::FLUSH && connection == 0 {
            Act::Send([done(Style::Extended, request), vec![1]].concat())
        } else {
            Act::Serve
        }
    });
    let storage = server.open();
    on_ring(|ring| async move {
        assert_eq!(storage.flush(&ring).await, Ok(()));
        assert_eq!(storage.flush(&ring).await, Ok(()));
    });
    assert_eq!(server.connections.load(std::sync::atomic::Ordering::SeqCst), 2);
}

#[test]
fn errors_of_the_server_reach_the_caller_as_what_they_are() {
    for (wire, found) in [
        (errno::EPERM, Errno::PERM),
        (errno::EIO, Errno::IO),
        (errno::ENOMEM, Errno::NOMEM),
        (errno::EINVAL, Errno::INVAL),
        (errno::ENOSPC, Errno::NOSPC),
        (errno::ENOTSUP, Errno::OPNOTSUPP),
        (12345, Errno::IO),
    ] {
        let server = Server::scripted(Offer::default(), move |_, request| {
            if request.command != command::WRITE {
                return Act::Serve;
            }
            let mut payload = wire.to_be_bytes().to_vec();
            payload.extend([0, 5]);
            payload.extend(b"sorry");
            Act::Send(chunk(Style::Extended, request, chunk::ERROR, &payload, true))
        });
        let storage = server.open();
        on_ring(|ring| async move {
            let buf = IoBuf::new(512, 512);
            assert_eq!(storage.write(&ring, 0, &buf).await, Err(found));
        });
        assert_eq!(server.connections.load(std::sync::atomic::Ordering::SeqCst), 1);
    }
}

#[test]
fn a_server_that_stands_still_blocks_no_thread() {
    let server = Server::scripted(Offer::default(), |_, _| Act::Ignore);
    let storage = server.open();
    on_ring(|ring| async move {
        let buf = IoBuf::new(512, 512);
        let waited = ring.within(Duration::from_millis(100), storage.read(&ring, 0, &buf)).await;
        assert!(waited.is_err(), "the request waits, and the thread goes on");
        drop(storage);
    });
}

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % limit as u64).expect("small")
    }
}

/// A sound answer to a read in two parts, in any order, with some bytes changed, left out or put
/// in.
fn damaged(random: &mut Random, request: &Request) -> Vec<u8> {
    let len = usize::try_from(request.len).expect("small");
    let (style, cut) = (Style::Extended, 1 + random.below(len - 1));
    let mut parts = vec![(0, cut), (cut, len)];
    if random.below(2) == 0 {
        parts.reverse();
    }
    let mut out = Vec::new();
    for (number, (from, to)) in parts.into_iter().enumerate() {
        let (offset, data) = (request.offset + from as u64, vec![7; to - from]);
        out.extend(data_chunk(style, request, offset, &data, number == 1));
    }
    for _ in 0..random.below(3) {
        let at = random.below(out.len());
        match random.below(3) {
            0 => out[at] ^= 1 << random.below(8),
            1 => drop(out.drain(at..(at + 1 + random.below(40)).min(out.len()))),
            _ => out.insert(at, 0),
        }
        // Most of the bytes are data: the heads are hit as well.
        let head = random.below(40).min(out.len() - 1);
        out[head] ^= u8::from(random.below(4) == 0);
    }
    out
}

#[test]
fn damaged_answers_touch_no_memory_but_that_of_their_request() {
    for seed in 1..=60u64 {
        let server = Server::scripted(Offer::default(), move |connection, request| {
            let mut random = Random(seed * 1000 + connection as u64);
            match request.command {
                // What is left out would be waited for: the connection ends behind it.
                command::READ if connection % 2 == 0 => {
                    Act::SendAndClose(damaged(&mut random, request))
                }
                _ => Act::Serve,
            }
        });
        server.disk.lock().unwrap().fill(7);
        let storage = server.open();
        on_ring(|ring| async move {
            let memory = IoBuf::new(3 * 65536, 4096);
            memory.fill(0x55);
            let buf = memory.slice(65536..2 * 65536);
            let read = storage.read(&ring, 8192, &buf).await;
            assert_eq!(read, Ok(65536), "the second connection is sound");
            let bytes = memory.to_vec();
            let untouched = |part: &[u8]| part.iter().all(|byte| *byte == 0x55);
            assert!(untouched(&bytes[..65536]) && untouched(&bytes[2 * 65536..]), "{seed}");
        });
    }
}
