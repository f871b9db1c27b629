//! Encrypted exports as images, with qemu-nbd as the server.

use std::path::Path;
use std::process::{Command, Stdio};

use ringdisk_testkit::certificates::{self, Authority, Subject};
use ringdisk_testkit::images::{self, pattern, piece};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};

use super::nbd::{Server, raw, there};
use crate::common::tools::ringdisk;
use crate::common::{MIB, refused, serve};

/// A qemu-nbd that wants certificates of clients.
fn encrypted(d: &Path, image: &Path, words: &[&str]) -> Server {
    let object = format!("tls-creds-x509,id=t,endpoint=server,dir={}", text(d));
    let own = ["-t", "-e", "8", "-f", "raw", "--object", &object, "--tls-creds", "t"];
    Server::start(d, "s", &[&own[..], words, &[text(image)]].concat())
}

fn uri(server: &Server, certificates: &Path) -> String {
    let (socket, directory) = (text(&server.socket), text(certificates));
    format!("nbds+unix:///?socket={socket}&tls-certificates={directory}")
}

#[test]
fn an_encrypted_export_is_an_image_and_is_connected_again() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let _authority = certificates::all(d);
    let image = raw(d, "disk.img");
    let mut server = encrypted(d, &image, &[]);
    let uri = uri(&server, d);
    ringdisk(d, &["convert", "-U", &uri, "copy.qcow2"]).ok();
    let info = ringdisk(d, &["info", "--json", &uri]).ok().json();
    assert_eq!(info["virtual-size"], 16 * MIB);
    // As root in a sandbox: the helper process connects, and the server shakes hands anew.
    let disk = serve(Path::new(&uri), &["-f", "raw"]);
    assert!(piece(disk.path(), 2 * MIB, 1 << 20) == pattern(3, 0, 1 << 20));
    images::raw(&d.join("new"), 4 * MIB, 8);
    for _ in 0..2 {
        let to = format!("of={}", disk.text());
        let from = format!("if={}", text(&d.join("new")));
        let words = [&from, &to, "seek=256", "bs=16k", "conv=notrunc,fsync", "oflag=dsync"];
        let mut client = Command::new("dd");
        let mut client = client.args(words).stderr(Stdio::null()).spawn().expect("dd");
        server.replace();
        assert!(client.wait().expect("dd").success());
    }
    assert_eq!(disk.stop().code(), Some(0));
    assert!(piece(&image, 4 * MIB, 4 << 20) == pattern(8, 0, 4 << 20));
}

#[test]
fn peers_that_are_not_trusted_are_refused_in_words() {
    if !there() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let authority = certificates::all(d);
    let image = raw(d, "disk.img");
    let server = encrypted(d, &image, &[]);
    let other = scratch();
    let o = other.path();
    Authority::new().write(o);
    ringdisk(d, &["info", &uri(&server, o)]).ends(6).says("invalid peer certificate");
    authority.write(o);
    // No certificate.
    let ran = ringdisk(d, &["info", &uri(&server, o)]);
    assert!(ran.code != 0, "{ran:?}");
    Authority::new().issue(o, "client", &Subject::default());
    let ran = ringdisk(d, &["info", &uri(&server, o)]);
    assert!(ran.code != 0, "{ran:?}");
    authority.issue(o, "client", &Subject::default());
    ringdisk(d, &["info", &uri(&server, o)]).ok();
    let named = format!("{}&tls-hostname=other", uri(&server, o));
    ringdisk(d, &["info", &named]).ends(6).says("not valid for name");
    let plain = format!("nbd+unix:///?socket={}", text(&server.socket));
    ringdisk(d, &["info", &plain]).ends(6).says("nbds://");
    drop(server);
    // A server that does not encrypt.
    let server = Server::start(d, "s", &["-t", "-f", "raw", text(&image)]);
    ringdisk(d, &["info", &uri(&server, d)]).ends(6).says("does not encrypt");
    // An expired certificate of the server.
    drop(server);
    authority.issue(d, "server", &Subject { has_expired: true, ..Subject::default() });
    let object = format!("tls-creds-x509,id=t,endpoint=server,dir={},sanity-check=off", text(d));
    let words = ["-t", "-f", "raw", "--object", &object, "--tls-creds", "t", text(&image)];
    let server = Server::start(d, "s", &words);
    ringdisk(d, &["info", &uri(&server, d)]).ends(6).says("expired");
}

#[test]
fn an_image_names_certificates_only_where_that_is_allowed() {
    if !there() || !needs_root() {
        return;
    }
    let directory = scratch();
    let d = directory.path();
    let _authority = certificates::all(d);
    let image = raw(d, "disk.img");
    let server = encrypted(d, &image, &["-r"]);
    let place = scratch();
    let top = place.path().join("top.qcow2");
    let uri = uri(&server, d);
    let words = ["create", "-b", &uri, "-F", "raw", text(&top), "16M"];
    ringdisk(place.path(), &words).ok();
    let host = format!("unix:{}", text(&server.socket));
    refused(&[text(&top), "--allow-host", &host], &["--allow-path"]);
    let disk = serve(&top, &["--allow-host", &host, "--allow-path", text(d)]);
    assert!(piece(disk.path(), 2 * MIB, 1 << 20) == pattern(3, 0, 1 << 20));
    assert_eq!(disk.stop().code(), Some(0));
}
