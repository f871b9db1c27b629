//! Options: each as the protocol has it, and malformed, too long, at the wrong time, half sent.

use std::time::{Duration, Instant};

use ringdisk_nbd::{NamedDisk, NbdOptions};
use ringdisk_nbd_protocol::handshake::{EXPORT_BYTES, ExportInfo, OptionHead};
use ringdisk_nbd_protocol::numbers::{command, info, option, option_reply};
use ringdisk_nbd_protocol::options::{BlockSizes, InfoReply, ListedExport};
use ringdisk_nbd_protocol::request::Style;

use crate::client::{Client, Server, null, options, request};

const SIZE: u64 = 64 << 20;

fn server() -> Server {
    let described = NamedDisk {
        description: String::from("a text"),
        ..NamedDisk::new("b", null(Duration::ZERO))
    };
    Server::start(vec![NamedDisk::new("", null(Duration::ZERO)), described], options(2))
}

fn greeted(server: &Server) -> Client {
    let mut client = server.connect();
    client.greet();
    client
}

#[test]
fn export_name_enters_transmission_with_and_without_zeroes() {
    let server = server();
    for (flags, zeroes) in [(3, 0), (1, 124), (0, 124), (2, 0)] {
        let mut client = server.connect();
        client.greet_with(flags);
        client.option(option::EXPORT_NAME, b"b");
        let bytes = client.receive(EXPORT_BYTES + zeroes);
        let info = ExportInfo::parse(bytes.first_chunk().unwrap()).unwrap();
        assert_eq!(info, ExportInfo { size: SIZE, flags: 0x0d6d });
        assert!(bytes[EXPORT_BYTES..].iter().all(|byte| *byte == 0));
        let reply = client.call(Style::Simple, request(command::READ, 0, 512), &[]);
        assert_eq!(reply.error, 0);
    }
}

#[test]
fn export_name_of_nothing_or_after_extended_headers_ends_the_connection() {
    let server = server();
    let mut client = greeted(&server);
    client.option(option::EXPORT_NAME, b"none");
    assert!(client.is_closed());
    let mut client = greeted(&server);
    client.agree(Style::Extended);
    client.option(option::EXPORT_NAME, b"");
    assert!(client.is_closed());
}

#[test]
fn go_and_info_say_what_was_asked_for() {
    let server = server();
    let mut client = greeted(&server);
    let wanted = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE, 99];
    let infos = client.info(option::INFO, "b", &wanted).unwrap();
    let infos: Vec<_> = infos.iter().map(|data| InfoReply::parse(data).unwrap()).collect();
    let sizes = BlockSizes { minimum: 1, preferred: 4096, maximum: 32 << 20 };
    let expected = [
        InfoReply::Name(b"b"),
        InfoReply::Description(b"a text"),
        InfoReply::BlockSizes(sizes),
        InfoReply::Export(ExportInfo { size: SIZE, flags: 0x0d6d }),
    ];
    assert_eq!(infos, expected);
    // It goes on after INFO, and flags follow what is agreed.
    client.agree(Style::Structured);
    assert_eq!(client.go("b").flags, 0x0ded);
    let mut client = greeted(&server);
    client.agree(Style::Extended);
    // What it could have, before it chooses contexts.
    let asked = client.info(option::INFO, "", &[]).unwrap();
    let asked: Vec<_> = asked.iter().map(|data| InfoReply::parse(data).unwrap()).collect();
    assert!(asked.contains(&InfoReply::Export(ExportInfo { size: SIZE, flags: 0x1ded })));
    client.set_contexts(&["base:allocation"]);
    assert_eq!(client.go("").flags, 0x1ded);
    // Contexts of another export do not count.
    let mut client = greeted(&server);
    client.agree(Style::Extended);
    client.set_contexts(&["base:allocation"]);
    assert_eq!(client.go("b").flags, 0x0ded);
}

#[test]
fn the_list_has_all_exports_with_their_descriptions() {
    let server = server();
    let mut client = greeted(&server);
    let replies = client.ask(option::LIST, &[]);
    let kinds: Vec<_> = replies.iter().map(|reply| reply.kind).collect();
    assert_eq!(kinds, [option_reply::SERVER, option_reply::SERVER, option_reply::ACK]);
    let listed = |at: usize| ListedExport::parse(&replies[at].data).unwrap();
    assert_eq!(listed(0), ListedExport { name: b"", description: b"" });
    assert_eq!(listed(1), ListedExport { name: b"b", description: b"a text" });
}

#[test]
fn abort_is_acknowledged_and_ends_the_connection() {
    let server = server();
    let mut client = greeted(&server);
    assert_eq!(client.ask(option::ABORT, &[])[0].kind, option_reply::ACK);
    assert!(client.is_closed());
}

#[test]
fn refusals_have_their_kinds_and_texts_and_the_handshake_goes_on() {
    let server = server();
    let mut client = greeted(&server);
    let long = vec![0; 70_000];
    let name = |name: &[u8]| {
        let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
        data.extend(name);
        data.extend([0, 0]);
        data
    };
    for (number, data, kind, text) in [
        (99, &[][..], option_reply::UNSUPPORTED, "Unsupported option 99 (<unknown>)"),
        (4, &[], option_reply::UNSUPPORTED, "Unsupported option 4 (<unknown>)"),
        (option::LIST, b"x", option_reply::INVALID, "option 'list' has unexpected length"),
        (option::STARTTLS, &[], option_reply::POLICY, "TLS not configured"),
        (option::STARTTLS, b"x", option_reply::INVALID, "unexpected length"),
        (option::STRUCTURED_REPLY, b"x", option_reply::INVALID, "unexpected length"),
        (option::EXTENDED_HEADERS, b"x", option_reply::INVALID, "unexpected length"),
        (option::LIST, &long, option_reply::TOO_BIG, "too long"),
        (option::GO, &long, option_reply::TOO_BIG, "too long"),
        (option::GO, &[], option_reply::INVALID, "too short"),
        (option::GO, &[0, 0, 0, 5, b'a', 0, 0], option_reply::INVALID, "too short"),
        (option::INFO, &[0, 0, 0, 0, 0, 1], option_reply::INVALID, "number of information"),
        (option::GO, &name(b"none"), option_reply::UNKNOWN, "export 'none' not present"),
        (option::GO, &name(b"a/../b"), option_reply::UNKNOWN, "export 'a/../b' not present"),
        (option::GO, &name(b"a\0b"), option_reply::INVALID, "NUL"),
        (option::GO, &name(&[b'x'; 5000]), option_reply::INVALID, "too long"),
        (option::GO, &name(&[b'x'; 4096]), option_reply::UNKNOWN, "xxx' not present"),
        (option::GO, &name(&[0xff; 9]), option_reply::UNKNOWN, "not present"),
        (
            option::SET_META_CONTEXT,
            &[0, 0, 0, 0, 0, 0, 0, 0],
            option_reply::INVALID,
            "'set meta context' when structured reply is not negotiated",
        ),
        (option::LIST_META_CONTEXT, &[0, 0, 0], option_reply::INVALID, "too short"),
    ] {
        let (found, words) = client.refused(number, data);
        assert_eq!(found, kind, "{number}: {words}");
        assert!(words.contains(text), "{number}: {words}");
        assert!(words.len() <= 4096);
    }
    client.agree(Style::Structured);
    let (kind, text) = client.refused(option::STRUCTURED_REPLY, &[]);
    assert_eq!(kind, option_reply::INVALID);
    assert_eq!(text, "structured reply already negotiated");
    client.agree(Style::Extended);
    let (kind, _) = client.refused(option::STRUCTURED_REPLY, &[]);
    assert_eq!(kind, option_reply::EXTENDED_HEADERS_REQUIRED);
    assert_eq!(client.refused(option::EXTENDED_HEADERS, &[]).0, option_reply::INVALID);
    assert_eq!(client.go("").size, SIZE);
}

#[test]
fn what_is_no_option_ends_the_connection() {
    let server = server();
    for flags in [4u32, 1 << 16, u32::MAX] {
        let mut client = server.connect();
        client.receive(18);
        client.send(&flags.to_be_bytes());
        assert!(client.is_closed(), "{flags:#x}");
    }
    let mut client = greeted(&server);
    client.send(b"IHAVEOPS\0\0\0\x03\0\0\0\0");
    assert!(client.is_closed());
    let mut client = greeted(&server);
    client.send(&OptionHead { option: option::LIST, len: (32 << 20) + 1 }.to_bytes());
    assert!(client.is_closed());
    // Without the fixed handshake there is one option.
    let mut client = server.connect();
    client.greet_with(0);
    client.option(option::LIST, &[]);
    assert!(client.is_closed());
}

#[test]
fn contexts_are_listed_chosen_and_replaced() {
    let server = server();
    let mut client = greeted(&server);
    let both = [String::from("base:allocation"), String::from("qemu:allocation-depth")];
    let names = |list: Vec<(u32, String)>| list.into_iter().map(|(_, name)| name);
    let list =
        |client: &mut Client, queries: &[&str]| client.contexts(option::LIST_META_CONTEXT, queries);
    assert!(names(list(&mut client, &[])).eq(both.clone()));
    assert!(names(list(&mut client, &["base:"])).eq([both[0].clone()]));
    assert!(names(list(&mut client, &["qemu:", "base:"])).eq(both.clone()));
    assert!(list(&mut client, &["other:x", "nonsense", ""]).is_empty());
    client.agree(Style::Structured);
    let chosen = client.set_contexts(&["qemu:allocation-depth", "base:allocation", "base:"]);
    assert_eq!(chosen, [(0, both[0].clone()), (1, both[1].clone())]);
    assert!(client.set_contexts(&["base:", "other:x"]).is_empty());
    // None is chosen any more.
    client.go("");
    let reply = client.call(Style::Structured, request(command::BLOCK_STATUS, 0, 512), &[]);
    assert_eq!(reply.text, "CMD_BLOCK_STATUS not negotiated");
}

#[test]
fn a_handshake_that_is_half_sent_or_never_sent_ends_in_time() {
    let limit = Duration::from_millis(300);
    let limited = NbdOptions { handshake_limit: Some(limit), ..options(1) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], limited);
    let begun = Instant::now();
    let (mut silent, mut half, mut within) = (server.connect(), server.connect(), server.connect());
    half.greet();
    half.send(b"IHAVE");
    within.greet();
    within.send(&OptionHead { option: option::GO, len: 100 }.to_bytes());
    within.send(&[0; 50]);
    // One that has entered transmission may be silent for as long as it likes.
    let mut client = server.client(Style::Simple);
    assert!(silent.is_closed() && half.is_closed() && within.is_closed());
    assert!(begun.elapsed() >= limit);
    std::thread::sleep(limit);
    assert_eq!(client.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
}
