//! This program under the name `qemu-nbd`: as scripts start it, with real clients.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use ringdisk_testkit::certificates;
use ringdisk_testkit::mount::text;
use ringdisk_testkit::process::{ok_words, until};

use crate::common::serving::Place;

fn qemu_nbd(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
    command.arg0("qemu-nbd").args(words);
    command
}

/// For what a process does when another one asked for it.
const SOON: Duration = Duration::from_secs(20);

fn output(words: &[&str]) -> Output {
    qemu_nbd(words).output().expect("it can be started")
}

fn uri(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", text(socket))
}

/// What scripts look for on the standard error output; the exit code is 1.
fn error(words: &[&str]) -> String {
    let output = output(words);
    assert_eq!(output.status.code(), Some(1), "{words:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn in_the_background_it_serves_until_it_is_stopped() {
    let place = Place::new("qcow2");
    let pid_file = place.directory.path().join("pid");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let words = ["-t", "-e 4", "--fork", "-f", "qcow2", "-k", socket, "--pid-file"];
    let started = output(&[&words[..], &[text(&pid_file), "--discard=unmap", image]].concat());
    assert!(started.status.success(), "{started:?}");
    assert!(started.stdout.is_empty() && started.stderr.is_empty(), "{started:?}");
    let uri = uri(&place.socket);
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 7 0 1M", &uri]);
    ok_words(&["qemu-io", "-f", "raw", "-c", "read -P 7 0 1M", &uri]);
    let list = output(&["-L", "-k", socket]);
    let list = String::from_utf8(list.stdout).expect("text");
    assert!(list.starts_with("exports available: 1\n export: ''\n  size:  8388608\n"), "{list}");
    // The other one is there where it is asked for (-A).
    assert!(list.contains("contexts: 1\n   base:allocation\n"), "{list}");
    let second = error(&["-f", "qcow2", "-k", &format!("{socket}-2"), image]);
    let wanted = format!(
        "qemu-nbd: Failed to blk_new_open '{image}': Failed to get \"write\" lock\n\
         Is another process using the image [{image}]?\n"
    );
    assert_eq!(second, wanted);
    let pid = fs::read_to_string(&pid_file).expect("a pid");
    ok_words(&["kill", pid.trim()]);
    assert!(until(SOON, || (!place.socket.exists()).then_some(())).is_some(), "the socket stays");
}

#[test]
fn the_first_client_ends_it_and_one_that_only_asks_does_not() {
    let place = Place::new("raw");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let mut server = qemu_nbd(&["-A", "-f", "raw", "-k", socket, image]).spawn().expect("a server");
    assert!(until(SOON, || place.socket.exists().then_some(())).is_some(), "no socket");
    let list = String::from_utf8(output(&["--list", "-k", socket]).stdout).expect("text");
    let contexts = "contexts: 2\n   base:allocation\n   qemu:allocation-depth\n";
    assert!(list.contains(contexts), "{list}");
    std::thread::sleep(Duration::from_millis(200));
    assert!(server.try_wait().expect("a state").is_none(), "a client that asks is none");
    ok_words(&["qemu-io", "-f", "raw", "-c", "write -P 7 0 1M", &uri(&place.socket)]);
    assert_eq!(server.wait().expect("an end").code(), Some(0));
    assert!(!place.socket.exists());
    assert!(fs::read(&place.image).expect("bytes")[..1 << 20].iter().all(|byte| *byte == 7));
}

#[test]
fn what_is_wrong_has_the_texts_of_qemu_nbd() {
    let place = Place::new("qcow2");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let raw = place.path("raw.img");
    ringdisk_testkit::images::sparse(&raw, 1 << 20);
    let raw = text(&raw);
    for (words, wanted) in [
        (
            &["-k", socket, "none"][..],
            "Failed to blk_new_open 'none': Could not open 'none': No such file or directory\n",
        ),
        (&["-f", "qcow2", "-B", "b", "-k", socket, image], "Bitmap 'b' is not found\n"),
        (
            &["-f", "qcow2", "-k", "/nonexistent/a", image],
            "Failed to bind socket to /nonexistent/a: No such file or directory\n",
        ),
        (
            &["--object", "tls-creds-psk,id=t,dir=/x", "-k", socket, image],
            "--object tls-creds-psk is not supported: use certificates",
        ),
        (
            &["--tls-creds", "nope", "-k", socket, image],
            "Failed to get TLS creds: No TLS credentials with id 'nope'\n",
        ),
        (
            &[
                "--object",
                "tls-creds-x509,id=t,endpoint=server,dir=/nowhere",
                "--tls-creds",
                "t",
                "-f",
                "qcow2",
                "-k",
                socket,
                image,
            ],
            "Unable to access credentials /nowhere/server-cert.pem: No such file or directory\n",
        ),
        (
            &["-f", "qcow2", "-k", socket, raw],
            &format!("Failed to blk_new_open '{raw}': Image is not in qcow2 format\n"),
        ),
        (
            &["--fork", "-f", "qcow2", "-k", socket, "--pid-file=/nonexistent/p", image],
            "Could not create '/nonexistent/p': No such file or directory\n",
        ),
        (
            &["-f", "qcow2", "-b", "nohost.invalid", "-p", "7", image],
            "address resolution failed for nohost.invalid:7: ",
        ),
        (
            &["-k", socket, "--image-opts", "driver=compress,file.filename=a"],
            "Failed to blk_new_open 'driver=compress,file.filename=a': the driver 'compress' is \
             not supported; supported: raw, qcow2 over file, host_device, nbd; what is written is \
             stored as it is: `convert -c` compresses it afterwards\n",
        ),
        (&["-e", "x", image], "Invalid shared device number 'x'\n"),
        (&["-L", "-k", socket], "Failed to connect to '"),
    ] {
        let said = error(words);
        assert!(said.starts_with(&format!("qemu-nbd: {wanted}")), "{words:?}: {said}");
    }
    assert!(!place.socket.exists());
}

#[test]
fn certificates_and_names_are_objects_as_callers_write_them() {
    let place = Place::new("raw");
    let directory = place.directory.path();
    let _authority = certificates::all(directory);
    let (image, socket) = (text(&place.image), text(&place.socket));
    let creds =
        |endpoint: &str| format!("tls-creds-x509,id=t,endpoint={endpoint},dir={}", text(directory));
    let (server, client) = (creds("server"), creds("client"));
    let own = ["-t", "--fork", "-f", "raw", "-k", socket, "--object", &server, "--tls-creds", "t"];
    let pid = directory.join("pid");
    let uri =
        format!("nbds+unix://localhost/?socket={socket}&tls-certificates={}", text(directory));
    let list = ["-L", "-k", socket, "--object", &client, "--tls-creds", "t"];
    for (identity, comes) in [("O=A,,CN=a client", true), ("CN=other", false)] {
        let authz = format!("authz-simple,id=a,identity={identity}");
        let more = ["--object", &authz, "--tls-authz", "a", "--pid-file", text(&pid), image];
        assert!(output(&[&own[..], &more].concat()).status.success());
        let came = output(&[&list[..], &["--tls-hostname", "localhost"]].concat());
        assert_eq!(came.status.success(), comes, "{came:?}");
        if comes {
            ok_words(&["nbdinfo", "--size", &uri]);
            let other = output(&[&list[..], &["--tls-hostname", "other"]].concat());
            assert_eq!(other.status.code(), Some(1));
        }
        // A plain client hears why.
        let said = error(&["-L", "-k", socket]);
        assert!(said.contains("Option 0x3 not permitted before TLS"), "{said}");
        let number = fs::read_to_string(&pid).expect("a pid").trim().to_owned();
        ok_words(&["kill", &number]);
        // Its lock on the image goes with the process, after its socket.
        let process = Path::new("/proc").join(number);
        assert!(until(SOON, || (!process.exists()).then_some(())).is_some());
    }
}

#[test]
fn a_socket_of_a_service_manager_is_served_in_the_foreground_and_in_the_background() {
    let place = Place::new("raw");
    let (image, socket) = (text(&place.image), text(&place.socket));
    let listener = std::os::unix::net::UnixListener::bind(&place.socket).expect("bind");
    let start = |words: &str, wait: bool| {
        let set = "LISTEN_PID=$$ LISTEN_FDS=1";
        let program = env!("CARGO_BIN_EXE_ringdisk");
        let script = format!("exec env {set} {program} nbd {words} 3<&0 0</dev/null");
        let input = listener.try_clone().expect("a descriptor");
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(script)
            .stdin(std::process::Stdio::from(std::os::fd::OwnedFd::from(input)));
        let mut child = command.stderr(std::process::Stdio::piped()).spawn().expect("a server");
        if !wait {
            drop(child.stderr.take());
        }
        child
    };
    let mut first = start(&format!("-f raw {image}"), false);
    // The first client ends it; the socket stays.
    ok_words(&["qemu-io", "-f", "raw", "-c", "read 0 1M", &uri(&place.socket)]);
    assert!(place.socket.exists());
    let pid = place.directory.path().join("pid");
    let words = format!("-f raw -t --fork --pid-file {} {image}", text(&pid));
    let ended = || {
        let free = Command::new("qemu-io").args(["-f", "raw", "-c", "read 0 1", image]).output();
        free.is_ok_and(|output| output.status.success()).then_some(())
    };
    assert!(until(SOON, ended).is_some(), "the first server holds the image");
    assert!(first.wait().expect("its end").success());
    let output = start(&words, true).wait_with_output().expect("an end");
    assert!(output.status.success(), "{output:?}");
    ok_words(&["qemu-io", "-f", "raw", "-c", "read 0 1M", &uri(&place.socket)]);
    ok_words(&["kill", fs::read_to_string(&pid).expect("a pid").trim()]);
    assert!(until(SOON, || (!pid.exists()).then_some(())).is_some());
    for (words, wanted) in [
        (format!("-k {socket} {image}"), "Unix socket can't be set when using socket activation"),
        (format!("-p 1 {image}"), "TCP port number can't be set when using socket activation"),
        (format!("-b ::1 {image}"), "The interface can't be set when using socket activation"),
    ] {
        let output = start(&words, true).wait_with_output().expect("an end");
        let said = String::from_utf8(output.stderr).expect("text");
        assert!(said.contains(wanted), "{said}");
    }
}

#[test]
fn what_is_no_device_of_the_kernel_is_refused_before_anything_is_served() {
    let place = Place::new("raw");
    let (image, device) = (text(&place.image), place.path("nbd0"));
    let device = text(&device);
    let nothing = format!("Failed to open {device}: No such file or directory\n");
    assert!(error(&["-c", device, image]).starts_with(&format!("qemu-nbd: {nothing}")));
    let nothing = format!("Cannot open {device}: No such file or directory\n");
    assert!(error(&["-d", device]).starts_with(&format!("qemu-nbd: {nothing}")));
    let creds = ["--object", "tls-creds-x509,id=t,endpoint=server,dir=/nowhere"];
    let tls = [&creds[..], &["--tls-creds", "t", "-c", "/dev/nbd0", image]].concat();
    for (words, wanted) in [
        (&["-c", "/dev/null", image][..], "Failed to open /dev/null: it is no NBD device"),
        (&["-c", image, image], "it is no NBD device"),
        (&["-d", "/dev/null"], "Cannot open /dev/null: it is no NBD device"),
        (&tls, "TLS is not supported with a host device"),
    ] {
        let said = error(words);
        assert!(said.contains(wanted), "{words:?}: {said}");
    }
}

/// The command line of Incus, for a disk that is written.
#[test]
fn a_bitmap_that_records_is_offered_as_it_is_at_the_start() {
    let place = Place::new("qcow2");
    let (image, socket) = (text(&place.image), text(&place.socket));
    ok_words(&["qemu-img", "bitmap", "--add", "-f", "qcow2", image, "b0"]);
    ok_words(&["qemu-io", "-f", "qcow2", "-c", "write -P 5 1M 64k", image]);
    let words = ["--fork", &format!("--socket={socket}"), "--bitmap=b0", "--format=qcow2", image];
    let started = output(&words);
    assert!(started.status.success(), "{started:?}");
    let map = ["nbdinfo", "--map=qemu:dirty-bitmap:b0", &uri(&place.socket)];
    let map = ok_words(&map);
    let map: Vec<&str> = map.split_whitespace().collect();
    assert!(map.windows(2).any(|pair| pair == ["1048576", "65536"]), "{map:?}");
    assert!(until(SOON, || (!place.socket.exists()).then_some(())).is_some());
}

#[test]
fn what_is_cleared_without_the_backing_file_stays_so_with_it() {
    for version in ["compat=v3", "compat=v3,extended_l2=on", "compat=v2"] {
        let place = Place::new("qcow2");
        let (base, socket) = (text(&place.image), text(&place.socket));
        ok_words(&["qemu-io", "-f", "qcow2", "-c", "write -P 5 0 2M", base]);
        let top = place.path("top.qcow2");
        let top = text(&top);
        let words = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-o", version];
        ok_words(&[&words[..], &["-b", base, top]].concat());
        let name = format!(
            "json:{{'driver':'qcow2','file':{{'driver':'file','filename':'{top}'}},'backing':null}}"
        );
        let words = ["--fork", "-k", socket, "--discard=unmap", "--detect-zeroes=unmap", &name];
        let started = output(&words);
        assert!(started.status.success(), "{started:?}");
        let clear =
            ["-c", "write -z -u 0 64k", "-c", "write -z 128k 64k", "-c", "write -P 0 256k 64k"];
        ok_words(&[&["qemu-io", "-f", "raw"], &clear[..], &[&uri(&place.socket)]].concat());
        assert!(until(SOON, || (!place.socket.exists()).then_some(())).is_some());
        let read = ["read -P 0 0 64k", "read -P 0 128k 64k", "read -P 0 256k 64k"];
        for read in read.into_iter().chain(["read -P 5 512k 64k"]) {
            ok_words(&["qemu-io", "-f", "qcow2", "-c", read, top]);
        }
        ringdisk_testkit::images::assert_clean(Path::new(top));
    }
}
