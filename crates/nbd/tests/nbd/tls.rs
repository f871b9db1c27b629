//! TLS: who is let in, what is refused, and what breaks it.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use ringdisk_nbd::{
    AllowList, Match, NamedDisk, NbdOptions, Rule, ServerTls, TlsOptions, TlsSource, VerifyPeer,
};
use ringdisk_nbd_protocol::numbers::{command, option, option_reply};
use ringdisk_nbd_protocol::options::push_option;
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_testkit::certificates::{self, Authority, Subject};
use ringdisk_tls::{Blocking, ClientTls, StreamError, TlsStream};
use tempfile::TempDir;

use crate::client::{Client, STYLES, Server, data, null, options, raw, request};

fn directory() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn opened(directory: &Path, verify: VerifyPeer, allow: Option<AllowList>) -> ServerTls {
    ServerTls::open(&TlsSource::Directory(directory.to_owned()), verify, allow).unwrap()
}

fn encrypted(server: ServerTls, required: bool) -> NbdOptions {
    NbdOptions { tls: Some(TlsOptions { server, required }), ..options(2) }
}

fn serving(server: ServerTls, required: bool) -> Server {
    let disks = vec![NamedDisk::new("", null(Duration::ZERO))];
    Server::start(disks, encrypted(server, required))
}

fn client_tls(directory: &Path) -> ClientTls {
    ClientTls::open(&TlsSource::Directory(directory.to_owned()), "localhost").unwrap()
}

/// Says STARTTLS and shakes hands. The stream stays the caller's.
fn shake(client: &mut Client, tls: &ClientTls) -> Result<TlsStream, StreamError> {
    assert_eq!(client.ask(option::STARTTLS, &[])[0].kind, option_reply::ACK);
    tls.connect(&mut client.0)
}

/// Whether an encrypted client comes as far as the list of exports.
fn comes_in(server: &Server, tls: &ClientTls) -> bool {
    let mut client = server.connect();
    client.greet();
    let Ok(stream) = shake(&mut client, tls) else { return false };
    let mut bytes = Vec::new();
    push_option(&mut bytes, option::LIST, &[]);
    let mut io = stream.blocking(&mut client.0);
    // Over TLS 1.3 a client hears of its certificate after its handshake.
    io.write_all(&bytes).is_ok() && io.read_exact(&mut [0; 20]).is_ok()
}

type Encrypted<'a> = Client<Blocking<'a, UnixStream>>;

fn enter(client: &mut Encrypted<'_>, style: Style) {
    client.agree(style);
    client.go("");
}

#[test]
fn requests_of_each_style_and_of_any_length_go_over_tls() {
    let place = directory();
    let _authority = certificates::all(place.path());
    let (disk, _) = raw(&place);
    let tls = opened(place.path(), VerifyPeer::default(), None);
    let server = Server::start(vec![NamedDisk::new("", disk)], encrypted(tls, true));
    let tls = client_tls(place.path());
    for style in STYLES {
        let mut plain = server.connect();
        plain.greet();
        let stream = shake(&mut plain, &tls).unwrap();
        let mut client = Client(stream.blocking(&mut plain.0));
        enter(&mut client, style);
        for len in [1usize, 512, 16_383, 16_384, 16_385, 65_536, 300_001, 8 << 20] {
            let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            let write = request(command::WRITE, 4096, len as u64);
            assert_eq!(client.call(style, write, &bytes).error, 0);
            let reply = client.call(style, request(command::READ, 4096, len as u64), &[]);
            assert_eq!(data(&reply, 4096, len), bytes, "{style:?} {len}");
        }
        // Many at once.
        for cookie in 0..100 {
            client.start(style, Request { cookie, ..request(command::READ, 0, 4096) }, &[]);
        }
        for _ in 0..100 {
            assert_eq!(client.reply_of(style, |_| 4096).error, 0);
        }
    }
}

#[test]
fn a_plain_client_is_refused_each_option_where_tls_is_required() {
    let place = directory();
    let _authority = certificates::all(place.path());
    let server = serving(opened(place.path(), VerifyPeer::No, None), true);
    let mut client = server.connect();
    client.greet();
    for number in [3u32, 6, 7, 8, 9, 10, 11, 99] {
        let expected = format!("Option {number:#x} not permitted before TLS");
        assert_eq!(client.refused(number, b"any"), (option_reply::TLS_REQUIRED, expected));
    }
    assert_eq!(client.refused(option::ABORT, &[]).0, option_reply::TLS_REQUIRED);
    assert!(client.is_closed());
    let mut client = server.connect();
    client.greet();
    client.option(option::EXPORT_NAME, b"");
    assert!(client.is_closed());
    // One that does not know the fixed handshake cannot encrypt.
    let mut client = server.connect();
    client.greet_with(0);
    client.option(option::STARTTLS, &[]);
    assert!(client.is_closed());
}

#[test]
fn plain_clients_come_beside_encrypted_ones_where_tls_is_allowed() {
    let place = directory();
    let _authority = certificates::all(place.path());
    let server = serving(opened(place.path(), VerifyPeer::default(), None), false);
    let mut client = server.client(Style::Simple);
    assert_eq!(client.call(Style::Simple, request(command::READ, 0, 512), &[]).error, 0);
    assert!(comes_in(&server, &client_tls(place.path())));
}

#[test]
fn certificates_that_are_missing_foreign_expired_or_revoked_are_refused() {
    let place = directory();
    let authority = certificates::all(place.path());
    authority.issue(place.path(), "client", &Subject { serial: 7, ..Subject::default() });
    let server = serving(opened(place.path(), VerifyPeer::default(), None), true);
    assert!(comes_in(&server, &client_tls(place.path())));
    let with = |make: &dyn Fn(&Path)| {
        let other = directory();
        authority.write(other.path());
        make(other.path());
        client_tls(other.path())
    };
    let none = with(&|_| {});
    let foreign = with(&|path| Authority::new().issue(path, "client", &Subject::default()));
    let expired = with(&|path| {
        authority.issue(path, "client", &Subject { has_expired: true, ..Subject::default() });
    });
    for tls in [&none, &foreign, &expired] {
        assert!(!comes_in(&server, tls));
    }
    let revoking = directory();
    for name in ["ca-cert.pem", "server-cert.pem", "server-key.pem"] {
        std::fs::copy(place.path().join(name), revoking.path().join(name)).unwrap();
    }
    authority.revoke(revoking.path(), 7);
    let server = serving(opened(revoking.path(), VerifyPeer::default(), None), true);
    assert!(!comes_in(&server, &client_tls(place.path())));
    let other = with(&|path| {
        authority.issue(path, "client", &Subject { serial: 8, ..Subject::default() });
    });
    assert!(comes_in(&server, &other));
    // The client looks, too.
    let foreign = directory();
    Authority::new().write(foreign.path());
    let mut client = server.connect();
    client.greet();
    let error = shake(&mut client, &client_tls(foreign.path())).unwrap_err().to_string();
    assert!(error.contains("invalid peer certificate"), "{error}");
    // Without an authority any client may come.
    let server = serving(opened(place.path(), VerifyPeer::No, None), true);
    assert!(comes_in(&server, &none));
}

#[test]
fn names_are_let_in_by_the_list_only() {
    let place = directory();
    let _authority = certificates::all(place.path());
    for (names, comes) in [
        (Match::Exact(String::from("O=A,CN=a client")), true),
        (Match::Exact(String::from("O=A")), false),
        (Match::Glob(String::from("O=?,CN=*")), true),
    ] {
        let allow = AllowList { rules: vec![Rule { names, allows: true }], allows_others: false };
        let tls = opened(place.path(), VerifyPeer::default(), Some(allow.clone()));
        let server = serving(tls, true);
        assert_eq!(comes_in(&server, &client_tls(place.path())), comes, "{allow:?}");
    }
    let source = TlsSource::Directory(place.path().to_owned());
    let error = ServerTls::open(&source, VerifyPeer::No, Some(AllowList::default())).unwrap_err();
    assert!(error.to_string().contains("need certificates"), "{error}");
}

#[test]
fn words_from_before_the_handshake_count_no_more_and_it_comes_once() {
    let place = directory();
    let _authority = certificates::all(place.path());
    let server = serving(opened(place.path(), VerifyPeer::default(), None), false);
    let mut plain = server.connect();
    plain.greet();
    plain.agree(Style::Structured);
    plain.set_contexts(&["base:allocation"]);
    let stream = shake(&mut plain, &client_tls(place.path())).unwrap();
    let mut client = Client(stream.blocking(&mut plain.0));
    let (kind, text) = client.refused(option::STARTTLS, &[]);
    assert_eq!((kind, text.as_str()), (option_reply::INVALID, "TLS already enabled"));
    // The style of replies is the first one again.
    assert_eq!(client.go("").flags, 0x0d6d);
    let reply = client.call(Style::Simple, request(command::READ, 0, 512), &[]);
    assert_eq!(reply.error, 0);
}

#[test]
fn plain_bytes_behind_starttls_are_never_taken() {
    let place = directory();
    let _authority = certificates::all(place.path());
    let server = serving(opened(place.path(), VerifyPeer::No, None), false);
    let mut client = server.connect();
    client.greet();
    let mut bytes = Vec::new();
    push_option(&mut bytes, option::STARTTLS, &[]);
    push_option(&mut bytes, option::LIST, &[]);
    client.send(&bytes);
    assert!(client.is_closed());
    // Later ones are no TLS.
    let mut client = server.connect();
    client.greet();
    assert_eq!(client.ask(option::STARTTLS, &[])[0].kind, option_reply::ACK);
    client.option(option::LIST, &[]);
    assert!(client.is_closed());
    assert!(comes_in(&server, &client_tls(place.path())));
}

#[test]
fn a_handshake_that_stops_halfway_ends_in_time() {
    let place = directory();
    let _authority = certificates::all(place.path());
    let tls = opened(place.path(), VerifyPeer::No, None);
    let limit = Some(Duration::from_millis(300));
    let options = NbdOptions { handshake_limit: limit, ..encrypted(tls, true) };
    let disks = vec![NamedDisk::new("", null(Duration::ZERO))];
    let server = Server::start(disks, options);
    for part in [&b""[..], b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"] {
        let mut client = server.connect();
        client.greet();
        assert_eq!(client.ask(option::STARTTLS, &[])[0].kind, option_reply::ACK);
        client.send(part);
        assert!(client.is_closed());
    }
    assert!(comes_in(&server, &client_tls(place.path())));
}

#[test]
fn damaged_cut_off_and_endless_records_end_their_connection_alone() {
    let place = directory();
    let _authority = certificates::all(place.path());
    let server = serving(opened(place.path(), VerifyPeer::No, None), true);
    let tls = client_tls(place.path());
    let mut other = server.connect();
    other.greet();
    let stream = shake(&mut other, &tls).unwrap();
    let mut other = Client(stream.blocking(&mut other.0));
    enter(&mut other, Style::Simple);
    // Damaged, longer than any record, of the type of a handshake (renegotiation), and an alert.
    let mut long = vec![23, 3, 3, 0xff, 0xff];
    long.resize(70_000, 0);
    for bytes in [
        b"\x17\x03\x03\x00\x20aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa".to_vec(),
        long,
        b"\x16\x03\x03\x00\x04\x00\x00\x00\x00".to_vec(),
        b"\x15\x03\x03\x00\x02\x02\x28".to_vec(),
    ] {
        let mut client = server.connect();
        client.greet();
        let stream = shake(&mut client, &tls).unwrap();
        enter(&mut Client(stream.blocking(&mut client.0)), Style::Simple);
        // It may close before it has read all.
        let _ = client.0.write_all(&bytes);
        assert!(client.is_closed());
    }
    // Closed without a word: in the middle of a record, and between two.
    for part in [&b""[..], b"\x17\x03\x03\x10\x00abc"] {
        let mut client = server.connect();
        client.greet();
        let stream = shake(&mut client, &tls).unwrap();
        enter(&mut Client(stream.blocking(&mut client.0)), Style::Simple);
        client.send(part);
        client.0.shutdown(Shutdown::Write).unwrap();
        assert!(client.is_closed());
    }
    assert_eq!(other.call(Style::Simple, request(command::FLUSH, 0, 0), &[]).error, 0);
}

#[test]
fn an_encrypted_client_that_reads_no_replies_stalls_alone() {
    let place = directory();
    let _authority = certificates::all(place.path());
    let tls = opened(place.path(), VerifyPeer::No, None);
    let options =
        NbdOptions { tls: Some(TlsOptions { server: tls, required: true }), ..options(1) };
    let server = Server::start(vec![NamedDisk::new("", null(Duration::ZERO))], options);
    let tls = client_tls(place.path());
    let mut stalled = server.connect();
    stalled.greet();
    let stream = shake(&mut stalled, &tls).unwrap();
    enter(&mut Client(stream.blocking(&mut stalled.0)), Style::Structured);
    stalled.0.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let bytes = request(command::READ, 0, 1 << 20).to_compact();
    let mut sent = 0;
    while sent < 100_000 && stream.blocking(&mut stalled.0).write_all(&bytes).is_ok() {
        sent += 1;
    }
    assert!(sent < 100_000, "it takes requests for ever");
    let mut other = server.connect();
    other.greet();
    let stream = shake(&mut other, &tls).unwrap();
    let mut other = Client(stream.blocking(&mut other.0));
    enter(&mut other, Style::Simple);
    for _ in 0..100 {
        let reply = other.call(Style::Simple, request(command::READ, 0, 4096), &[]);
        assert_eq!(reply.error, 0);
    }
}

#[test]
fn files_that_are_missing_or_wrong_are_named() {
    let place = directory();
    let open = |verify| {
        let source = TlsSource::Directory(place.path().to_owned());
        ServerTls::open(&source, verify, None).unwrap_err().to_string()
    };
    let shown = place.path().display();
    let missing = |name: &str| {
        format!("Unable to access credentials {shown}/{name}: No such file or directory")
    };
    assert_eq!(open(VerifyPeer::default()), missing("server-cert.pem"));
    let authority = Authority::new();
    authority.issue(place.path(), "server", &Subject::default());
    assert_eq!(open(VerifyPeer::Yes), missing("ca-cert.pem"));
    let key = place.path().join("server-key.pem");
    std::fs::write(&key, "nothing").unwrap();
    assert_eq!(open(VerifyPeer::No), format!("{shown}/server-key.pem holds no private key in PEM"));
    std::fs::write(&key, "-----BEGIN ENCRYPTED PRIVATE KEY-----\n").unwrap();
    assert!(open(VerifyPeer::No).contains("is encrypted"));
    authority.issue(place.path(), "other", &Subject::default());
    std::fs::rename(place.path().join("other-key.pem"), &key).unwrap();
    assert!(open(VerifyPeer::No).contains("server-cert.pem cannot be used"));
}
