//! Who may connect to `ringdisk serve --nbd`, with real clients: TLS, users, sockets from outside.

use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Stdio;

use ringdisk_testkit::certificates::{self, Authority, Subject};
use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{command, ok_words};
use rustix::process::Signal;

use crate::common::serving::{Daemon, Place, serve_command};
use crate::common::tools::{qemu_img, ringdisk};

/// A port that nobody listens on at this moment.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Whether a command succeeds; what it says is its own.
fn succeeds(words: &[&str]) -> bool {
    let mut command = command(words);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().expect("it starts").success()
}

fn stop(daemon: Daemon) {
    daemon.process.signal(Signal::TERM);
    daemon.ends(0);
}

#[test]
fn libnbd_and_qemu_use_an_encrypted_disk_and_plain_clients_are_refused() {
    let place = Place::new("qcow2");
    let directory = place.directory.path();
    let _authority = certificates::all(directory);
    let (image, socket, port) = (text(&place.image), text(&place.socket), port().to_string());
    let words = ["--nbd", socket, "--nbd", &port, "--tls-creds", text(directory)];
    let daemon = Daemon::of(&mut serve_command(&[&[image][..], &words].concat()));
    // Readers of a checkpoint would not be encrypted.
    let target = text(&place.socket);
    let at = format!("127.0.0.1:{}", self::port());
    ringdisk(directory, &["ctl", target, "checkpoint", "c", "--nbd", &at])
        .ends(2)
        .says("served with TLS only")
        .says("ssh -L");
    let source = directory.join("source");
    let bytes: Vec<u8> = (0..8u32 << 20).map(|at| (at / 777).to_le_bytes()[0]).collect();
    fs::write(&source, &bytes).unwrap();
    let tcp = format!("nbds://localhost:{port}/?tls-certificates={}", text(directory));
    let many = ["nbdcopy", "--connections=4", "--flush", text(&source), &tcp];
    ok_words(&many);
    let unix =
        format!("nbds+unix://localhost/?socket={socket}&tls-certificates={}", text(directory));
    let copy = directory.join("copy");
    ok_words(&["nbdcopy", "--connections=4", &unix, text(&copy)]);
    assert!(fs::read(&copy).unwrap() == bytes);
    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={}", text(directory));
    let options = format!("driver=nbd,host=localhost,port={port},tls-creds=t");
    let compare = [
        "compare",
        "--object",
        &object,
        "--image-opts",
        &options,
        "driver=raw,\
                   file.filename=source",
    ];
    qemu_img(directory, &compare).ok();
    // Ours: in every direction, mounted too.
    ringdisk(directory, &["compare", "-F", "raw", &tcp, "source"]).ok();
    ringdisk(directory, &["convert", "-O", "qcow2", &unix, "copy.qcow2"]).ok();
    ringdisk(directory, &["compare", "-F", "raw", "copy.qcow2", "source"]).ok();
    if needs_root() {
        ringdisk(directory, &["mount", "--daemonize", "-f", "raw", &tcp, "mounted"]).ok();
        let mounted = directory.join("mounted");
        assert!(fs::read(&mounted).unwrap() == bytes);
        let to = format!("of={}", text(&mounted));
        ok_words(&["dd", "if=/dev/zero", &to, "bs=64k", "count=4", "conv=notrunc,fsync"]);
        ringdisk(directory, &["umount", "mounted"]).ok();
        ok_words(&["nbdcopy", &unix, text(&copy)]);
        assert!(fs::read(&copy).unwrap()[..4 << 16].iter().all(|byte| *byte == 0));
    }
    let plain = format!("nbd://localhost:{port}/");
    assert!(!succeeds(&["nbdinfo", &plain]));
    ringdisk(directory, &["info", &plain]).ends(6).says("not permitted before TLS").says("nbds://");
    // The certificate names localhost and 127.0.0.1.
    ringdisk(directory, &["info", &format!("{tcp}&tls-hostname=127.0.0.1")]).ok();
    let other = format!("{tcp}&tls-hostname=other");
    ringdisk(directory, &["info", &other]).ends(6).says("not valid for name");
    stop(daemon);
}

#[test]
fn clients_without_a_name_on_the_list_are_sent_away() {
    let place = Place::new("raw");
    let directory = place.directory.path();
    let authority = certificates::all(directory);
    let (image, socket) = (text(&place.image), text(&place.socket));
    let words = ["--nbd", socket, "--tls-creds", text(directory), "--tls-allow", "O=A,CN=a client"];
    let words = [&[image, "-f", "raw"][..], &words].concat();
    let daemon = Daemon::of(&mut serve_command(&words));
    let uri = |directory: &Path| {
        let directory = text(directory);
        format!("nbds+unix://localhost/?socket={socket}&tls-certificates={directory}")
    };
    ok_words(&["nbdinfo", "--size", &uri(directory)]);
    ringdisk(directory, &["info", &uri(directory)]).ok();
    let other = tempfile::tempdir().unwrap();
    authority.write(other.path());
    let expired = Subject { has_expired: true, ..Subject::default() };
    let foreign = Authority::new();
    // Of another name, expired, of another authority.
    for (authority, subject) in
        [(&authority, Subject::default()), (&authority, expired), (&foreign, Subject::default())]
    {
        authority.issue(other.path(), "client", &subject);
        assert!(!succeeds(&["nbdinfo", "--size", &uri(other.path())]));
        assert!(ringdisk(directory, &["info", &uri(other.path())]).code != 0);
    }
    let finished = {
        daemon.process.signal(Signal::TERM);
        daemon.ends(0)
    };
    let output = finished.output();
    assert!(output.contains("x509 authz check for CN=localhost is denied"), "{output}");
}

#[test]
fn keys_come_by_descriptor_and_words_that_do_not_fit_are_refused() {
    let place = Place::new("raw");
    let directory = place.directory.path();
    let _authority = certificates::all(directory);
    let (image, socket, d) = (text(&place.image), text(&place.socket), text(directory));
    let script = format!(
        "exec \"$0\" serve -f raw \"$1\" --nbd \"$2\" --tls-creds \
         cert={d}/server-cert.pem,key=fd:7,ca=fd:8 7<{d}/server-key.pem 8<{d}/ca-cert.pem"
    );
    let mut shell =
        command(&["bash", "-c", &script, env!("CARGO_BIN_EXE_ringdisk"), image, socket]);
    shell.env_remove("NOTIFY_SOCKET");
    let daemon = Daemon::of(&mut shell);
    let uri = format!("nbds+unix://localhost/?socket={socket}&tls-certificates={d}");
    ok_words(&["nbdinfo", "--size", &uri]);
    daemon.stop(&[&place.socket]);
    let root = Path::new("/");
    let own = ["serve", image, "-f", "raw", "--nbd", socket];
    for (words, text) in [
        (&["--tls", "required"][..], "--tls-creds"),
        (&["--tls-allow", "CN=x"], "--tls-creds"),
        (&["--tls-creds", "/nowhere"], "credentials /nowhere/server-cert.pem: No such file"),
        (&["--tls-creds", "key=x,kay=y"], "'kay=y' is none of"),
        (&["--tls-creds", d, "--tls-verify-peer=no", "--tls-allow", "CN=x"], "need certificates"),
        (&["--allow-user", "nobody-here"], "no user 'nobody-here'"),
        (&["--allow-group", "nobody-here"], "no group 'nobody-here'"),
        (&["--nbd", "fd:9"], "descriptor 9 is no socket"),
    ] {
        ringdisk(root, &[&own[..], words].concat()).ends(2).says(text);
    }
    assert!(!place.socket.exists());
}

#[test]
fn only_processes_of_allowed_users_may_connect() {
    if !needs_root() {
        return;
    }
    let place = Place::new("raw");
    // The other user has to reach the socket.
    std::os::unix::fs::chown(place.directory.path(), Some(65534), None).unwrap();
    let (image, socket) = (text(&place.image), text(&place.socket));
    let uri = format!("nbd+unix:///?socket={socket}");
    let own = [image, "-f", "raw", "--nbd", socket, "--socket-mode", "0666"];
    let as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let as_nobody = [&as_nobody[..], &["nbdinfo", "--size", &uri]].concat();
    for (words, comes) in [
        (&[][..], true),
        (&["--allow-user", "65534"], true),
        (&["--allow-group", "65534"], true),
        (&["--allow-user", "1"], false),
        (&["--allow-group", "1"], false),
    ] {
        let daemon = Daemon::of(&mut serve_command(&[&own[..], words].concat()));
        assert_eq!(succeeds(&as_nobody), comes, "{words:?}");
        // Root may always.
        ok_words(&["nbdinfo", "--size", &uri]);
        let finished = daemon.stop(&[&place.socket]);
        assert_eq!(finished.output().contains("is sent away"), !comes, "{words:?}");
    }
}

#[test]
fn sockets_of_a_service_manager_are_served_by_number_and_by_name() {
    let place = Place::new("raw");
    let image = text(&place.image);
    let listener = UnixListener::bind(&place.socket).unwrap();
    let uri = format!("nbd+unix:///?socket={}", text(&place.socket));
    let named = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=disk";
    for (set, address) in [("", "fd:3"), (named, "fd:3"), (named, "fd:disk")] {
        let daemon = Daemon::with(&listener, set, &[image, "-f", "raw", "--nbd", address]);
        ok_words(&["nbdinfo", "--size", &uri]);
        // By the name of the socket, which is not ours.
        ringdisk(Path::new("/"), &["ctl", text(&place.socket), "stats"]).ok();
        stop(daemon);
        assert!(place.socket.exists());
    }
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let daemon = Daemon::with(&tcp, "", &[image, "-f", "raw", "--nbd", "fd:3"]);
    ok_words(&["nbdinfo", "--size", &format!("nbd://127.0.0.1:{port}")]);
    stop(daemon);
}
