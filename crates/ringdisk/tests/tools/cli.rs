//! The command line, as far as it needs no mount: what is refused and how, what is printed, and
//! that `info` and `map` say what `qemu-img` says.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use ringdisk_testkit::images::{qemu_img, qemu_io};
use ringdisk_testkit::limits::{is_root, needs};
use ringdisk_testkit::mount::for_user;
use ringdisk_testkit::process::{command, has, run};
use serde_json::Value;
use tempfile::TempDir;

const PROGRAM: &str = env!("CARGO_BIN_EXE_ringdisk");
/// A user who owns nothing.
const NOBODY: u32 = 65534;

fn ringdisk(words: &[&str]) -> Output {
    ringdisk_in(Path::new("."), words)
}

fn ringdisk_in(directory: &Path, words: &[&str]) -> Output {
    Command::new(PROGRAM)
        .args(words)
        .current_dir(directory)
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::null())
        .output()
        .expect("the program starts")
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or(-1)
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Fails with `exit`, says each of `words` on standard error, and does not panic.
fn refused(directory: &Path, arguments: &[&str], exit: i32, words: &[&str]) {
    let output = ringdisk_in(directory, arguments);
    let text = stderr(&output);
    assert_eq!(code(&output), exit, "{arguments:?}: {text}");
    let missing: Vec<&&str> = words.iter().filter(|word| !text.contains(**word)).collect();
    assert!(missing.is_empty(), "{arguments:?}: nothing of {missing:?} in: {text}");
    assert!(!text.contains("panicked") && !text.contains("os error"), "{text}");
}

fn scratch() -> TempDir {
    tempfile::tempdir().expect("a directory")
}

fn sparse(path: &Path, len: u64) {
    fs::File::create(path).and_then(|file| file.set_len(len)).expect("a file");
}

#[test]
fn bad_words_end_with_code_2_and_show_the_usage() {
    let directory = scratch();
    for (words, text) in [
        (&["mount"][..], "Usage: ringdisk mount"),
        (&["mount", "disk.img"], "MOUNTPOINT is missing"),
        (&["mount", "--null", "1Q", "x"], "unknown unit 'Q'"),
        (&["mount", "--null", "10GB", "x"], "powers of 1000 or of 1024"),
        (&["mount", "--latency", "5", "--null", "1G", "x"], "a unit is missing"),
        (&["mount", "--threads", "0", "a", "b"], "a number from 1 to"),
        (&["mount", "--cpus", "2-1", "a", "b"], "the range '2-1' runs backwards"),
        (&["mount", "--numa", "on", "a", "b"], "possible values: auto, off"),
        (&["mount", "--cache", "sync", "a", "b"], "possible values: writeback"),
        (&["mount", "-f", "vmdk", "a", "b"], "possible values: raw, qcow2"),
        (&["mount", "--frob", "a", "b"], "--frob"),
        (&["frobnicate"], "frobnicate"),
        (&["completions", "tcsh"], "possible values"),
        (&["info"], "<IMAGE>"),
    ] {
        refused(directory.path(), words, 2, &[text]);
    }
    assert_eq!(fs::read_dir(directory.path()).expect("list").count(), 0);
}

#[test]
fn help_and_version_end_with_code_0() {
    for words in [&["--help"][..], &["-V"], &["mount", "--help"], &["help", "map"]] {
        let output = ringdisk(words);
        assert_eq!(code(&output), 0, "{words:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{words:?}");
    }
    let help = stdout(&ringdisk(&["mount", "--help"]));
    for option in [
        "--null",
        "--create",
        "--growable",
        "--resizable",
        "--pidfile",
        "--io-timeout",
        "--stop-timeout",
        "--threads",
        "--cpus",
        "--numa",
        "Examples:",
    ] {
        assert!(help.contains(option), "{option}");
    }
    // The default of a stop, and the other one.
    let words: Vec<&str> = help.split_whitespace().collect();
    let help = words.join(" ");
    assert!(
        help.contains("which is the default; under a service manager (NOTIFY_SOCKET) that is 60s")
    );
}

#[test]
fn an_image_that_cannot_be_used_is_named_with_its_reason() {
    let directory = scratch();
    let d = directory.path();
    fs::create_dir(d.join("folder")).expect("mkdir");
    fs::write(d.join("disk.vmdk"), b"KDMV and more").expect("write");
    fs::write(d.join("broken.qcow2"), b"QFI\xfb\0\0\0\x03").expect("write");
    for command in [&["info"][..], &["map"]] {
        let with = |image| [command, &[image]].concat();
        refused(d, &with("nosuch.img"), 3, &["nosuch.img", "No such file"]);
        refused(d, &with("folder"), 3, &["folder"]);
        refused(d, &with("disk.vmdk"), 3, &["vmdk"]);
        refused(d, &with("broken.qcow2"), 3, &["broken.qcow2"]);
    }
    refused(d, &["mount", "nosuch.img", "disk"], 3, &["nosuch.img", "try: ", "--create 10G"]);
    refused(d, &["mount", "folder", "disk"], 3, &["folder"]);
    assert!(!d.join("disk").exists(), "a mountpoint was left behind");
}

#[test]
fn a_mountpoint_that_cannot_be_used_is_refused_before_anything_is_made() {
    let directory = scratch();
    let d = directory.path();
    fs::create_dir(d.join("folder")).expect("mkdir");
    refused(d, &["mount", "--create", "1M", "a.img", "folder"], 4, &["a directory"]);
    refused(
        d,
        &["mount", "--create", "1M", "a.img", "no/disk"],
        4,
        &["directory 'no' does not exist", "mkdir -p no"],
    );
    refused(d, &["mount", "--null", "1M", "/dev/null"], 4, &["/dev/null"]);
    std::os::unix::fs::symlink("/nonexistent/disk", d.join("link")).expect("a link");
    refused(d, &["mount", "--null", "1M", "link"], 4, &["a symbolic link", "/nonexistent/disk"]);
    fs::write(d.join("target"), "").expect("write");
    std::os::unix::fs::symlink("target", d.join("near")).expect("a link");
    refused(d, &["mount", "--null", "1M", "near"], 4, &["a symbolic link", "target"]);
    std::os::unix::fs::symlink("none", d.join("dangling")).expect("a link");
    refused(d, &["mount", "--null", "1M", "dangling"], 4, &["a symbolic link"]);
    assert!(!d.join("none").exists());
    assert!(!d.join("a.img").exists());
}

#[test]
fn umount_of_what_is_not_mounted_says_so() {
    let directory = scratch();
    fs::write(directory.path().join("file"), "").expect("write");
    refused(directory.path(), &["umount", "file"], 4, &["nothing is mounted on"]);
}

#[test]
fn a_pid_file_that_is_none_is_left_alone_and_stops_the_start() {
    let directory = scratch();
    let d = directory.path();
    fs::write(d.join("notes"), "my notes").expect("write");
    let words = ["mount", "--pidfile", "notes", "--create", "1M", "a.img", "disk"];
    refused(d, &words, 1, &["cannot create PID file", "something else than a pid"]);
    assert_eq!(fs::read_to_string(d.join("notes")).expect("read"), "my notes");
    assert!(!d.join("a.img").exists() && !d.join("disk").exists());
}

#[test]
fn a_start_in_the_background_reports_errors_with_their_codes() {
    let directory = scratch();
    refused(directory.path(), &["mount", "--daemonize", "nosuch.img", "disk"], 3, &["nosuch.img"]);
    assert_eq!(fs::read_dir(directory.path()).expect("list").count(), 0);
}

#[test]
fn closed_and_full_streams_neither_panic_nor_hide_a_failure() {
    let directory = scratch();
    sparse(&directory.path().join("a.img"), 1 << 20);
    let shell = |script: &str| {
        let output = Command::new("sh")
            .args(["-c", script, PROGRAM])
            .current_dir(directory.path())
            .output()
            .expect("sh");
        assert!(!stderr(&output).contains("panicked"), "{script}: {}", stderr(&output));
        code(&output)
    };
    assert_eq!(shell("exec \"$0\" info a.img >&-"), 0);
    assert_eq!(shell("exec \"$0\" info a.img <&- >&- 2>&-"), 0);
    assert_eq!(shell("exec \"$0\" info nosuch 2>&-"), 3);
    assert_eq!(shell("exec \"$0\" info nosuch 2>/dev/full"), 3);
    assert_eq!(shell("exec \"$0\" -vvv info a.img 2>/dev/full >/dev/null"), 0);
    assert_eq!(shell("exec \"$0\" info a.img >/dev/full"), 1);
    assert_eq!(shell("exec \"$0\" --help >/dev/full"), 0);
    assert_eq!(
        shell("{ \"$0\" map --json a.img; echo $? >&2; } 2>code | true; exit $(cat code)"),
        0
    );
    assert_eq!(shell("\"$0\" completions bash | head -c 10 >/dev/null"), 0);
}

#[test]
fn completions_know_the_commands_and_options() {
    for (shell, words) in [
        ("bash", ["_ringdisk()", "--io-timeout"]),
        ("zsh", ["#compdef ringdisk", "--io-timeout"]),
        ("fish", ["complete -c ringdisk", "io-timeout"]),
    ] {
        let output = ringdisk(&["completions", shell]);
        assert_eq!(code(&output), 0);
        let text = stdout(&output);
        assert!(words.iter().all(|word| text.contains(word)), "{shell}");
    }
}

#[test]
fn man_pages_exist_for_every_command_and_list_the_exit_codes() {
    let directory = scratch();
    let target = directory.path().join("man/man1");
    let output = ringdisk(&["man", &target.to_string_lossy()]);
    assert_eq!(code(&output), 0, "{}", stderr(&output));
    for page in [
        "",
        "-mount",
        "-umount",
        "-ctl",
        "-topology",
        "-create",
        "-info",
        "-map",
        "-check",
        "-resize",
        "-snapshot",
        "-commit",
        "-rebase",
        "-convert",
        "-compare",
        "-measure",
        "-bitmap",
        "-backup",
        "-restore",
        "-completions",
        "-man",
    ] {
        let text = fs::read_to_string(target.join(format!("ringdisk{page}.1"))).expect("a page");
        assert!(text.contains(".SH \"EXIT STATUS\""), "ringdisk{page}.1: {text}");
        // These two have the codes of qemu-img.
        let is_general = text.contains("io_uring is forbidden or missing here.");
        assert_eq!(is_general, !["-check", "-compare"].contains(&page), "ringdisk{page}.1");
    }
    assert!(stdout(&ringdisk(&["man"])).starts_with(".ie"));
    let mount = fs::read_to_string(target.join("ringdisk-mount.1")).expect("a page");
    assert!(mount.contains(".SH EXAMPLES") && mount.contains("NOTIFY_SOCKET"), "{mount}");
}

#[test]
fn man_pages_are_accepted_by_man() {
    if !(needs("man", has("man")) && needs("groff", has("groff"))) {
        return;
    }
    let directory = scratch();
    assert_eq!(code(&ringdisk(&["man", &directory.path().to_string_lossy()])), 0);
    let output = Command::new("man")
        .args(["--warnings", "-l", "ringdisk-mount.1"])
        .current_dir(directory.path())
        .output()
        .expect("man");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", stderr(&output));
    assert!(stdout(&output).contains("EXIT STATUS"));
}

#[test]
fn an_unreadable_image_is_a_matter_of_permission() {
    let directory = scratch();
    let image = directory.path().join("secret.img");
    sparse(&image, 4096);
    fs::set_permissions(&image, fs::Permissions::from_mode(0o000)).expect("chmod");
    let words = ["info", "secret.img"];
    let said = ["secret.img", "Permission denied"];
    if !is_root() {
        return refused(directory.path(), &words, 6, &said);
    }
    // Root reads everything, so this is another user, who may start the program and look into the
    // directory.
    let (_place, program) = for_user(PROGRAM, NOBODY);
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("chmod");
    let ids = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")];
    let mut other = command(&["setpriv", &ids[0], &ids[1], "--clear-groups"]);
    let finished = run(other.arg(&program).args(words).current_dir(directory.path()));
    assert_eq!(finished.code(), Some(6), "{}", finished.output());
    assert!(said.iter().all(|word| finished.stderr.contains(word)), "{}", finished.output());
}

/// Images of many kinds, with data in some places.
fn gallery() -> TempDir {
    let directory = scratch();
    let path = |name: &str| directory.path().join(name);
    let make = |options: &[&str], name: &str, more: &[&str]| {
        let file = path(name).to_string_lossy().into_owned();
        let words = [&["create", "-q", "-f", "qcow2"], options, &[file.as_str()], more].concat();
        qemu_img(&words);
    };
    sparse(&path("base.raw"), 10 << 20);
    qemu_io(&path("base.raw"), "raw", &["write -P 1 5M 64k", "write -P 2 0 4k"]);
    make(&[], "plain.qcow2", &["10M"]);
    make(&["-o", "compat=0.10"], "v2.qcow2", &["10M"]);
    make(&["-o", "extended_l2=on,cluster_size=64k"], "subclusters.qcow2", &["10M"]);
    make(&["-o", "compression_type=zstd,lazy_refcounts=on"], "zstd.qcow2", &["10M"]);
    make(&["-o", "refcount_bits=1,cluster_size=2M"], "large.qcow2", &["10M"]);
    make(&["-b", "base.raw", "-F", "raw"], "overlay.qcow2", &[]);
    make(&["-b", "overlay.qcow2", "-F", "qcow2"], "top.qcow2", &["12M"]);
    for name in ["plain", "v2", "subclusters", "zstd", "large", "overlay", "top"] {
        let commands = ["write -P 3 1M 256k", "write -z 3M 128k", "write -c -P 4 4M 64k"];
        let skipped = usize::from(name == "large");
        let image = path(&format!("{name}.qcow2"));
        qemu_io(&image, "qcow2", &commands[..commands.len() - skipped]);
    }
    let plain = path("plain.qcow2").to_string_lossy().into_owned();
    qemu_img(&["snapshot", "-c", "before", &plain]);
    qemu_img(&["bitmap", "--add", &plain, "changes"]);
    directory
}

const GALLERY: [&str; 8] = [
    "base.raw",
    "plain.qcow2",
    "v2.qcow2",
    "subclusters.qcow2",
    "zstd.qcow2",
    "large.qcow2",
    "overlay.qcow2",
    "top.qcow2",
];

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// `qemu-img COMMAND --output=json IMAGE` and ours, both in the directory of the image.
fn both(directory: &Path, command: &[&str], image: &str) -> (Value, Value) {
    let theirs = Command::new("qemu-img")
        .args(command)
        .args(["--output=json", image])
        .current_dir(directory)
        .output()
        .expect("qemu-img");
    let ours = ringdisk_in(directory, &[command, &["--output=json", image]].concat());
    assert_eq!(code(&ours), 0, "{image}: {}", stderr(&ours));
    (json(&stdout(&ours)), json(&stdout(&theirs)))
}

#[test]
fn map_says_what_qemu_img_says() {
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let gallery = gallery();
    for image in GALLERY {
        let (ours, theirs) = both(gallery.path(), &["map"], image);
        assert_same_keys(&ours, &theirs, image);
        let window = ["map", "--start-offset=1M", "--max-length=3M"];
        let (ours, theirs) = both(gallery.path(), &window, image);
        assert_same_keys(&ours, &theirs, &format!("{image}, a part"));
    }
}

#[test]
fn info_says_what_qemu_img_says() {
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let gallery = gallery();
    for image in GALLERY {
        let (ours, theirs) = both(gallery.path(), &["info"], image);
        assert_same_keys(&ours, &theirs, image);
        let (ours, theirs) = both(gallery.path(), &["info", "--backing-chain"], image);
        assert_same_keys(&ours, &theirs, image);
    }
}

/// Every key that they have is ours with the same value, so older versions that say less are fine.
fn assert_same_keys(ours: &Value, theirs: &Value, what: &str) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                let mine = ours.get(key).unwrap_or_else(|| panic!("{what}: no {key}"));
                assert_same_keys(mine, value, &format!("{what}: {key}"));
            }
        }
        (Value::Array(ours), Value::Array(theirs)) => {
            assert_eq!(ours.len(), theirs.len(), "{what}: {ours:?} {theirs:?}");
            for (mine, other) in ours.iter().zip(theirs) {
                assert_same_keys(mine, other, what);
            }
        }
        _ => assert_eq!(ours, theirs, "{what}"),
    }
}

#[test]
fn people_see_the_same_facts_as_programs() {
    if !needs("qemu-img", has("qemu-img")) {
        return;
    }
    let gallery = gallery();
    let text = stdout(&ringdisk_in(gallery.path(), &["info", "--backing-chain", "top.qcow2"]));
    for line in [
        "image: top.qcow2\n",
        "file format: qcow2\n",
        "virtual size: 12 MiB (12582912 bytes)\n",
        "backing file: overlay.qcow2\n",
        "\n\nimage: overlay.qcow2\n",
        "\n\nimage: base.raw\n",
    ] {
        assert!(text.contains(line), "{line:?} in {text}");
    }
    let map = stdout(&ringdisk_in(gallery.path(), &["map", "overlay.qcow2"]));
    assert!(map.starts_with("Offset          Length          Mapped to       File\n"), "{map}");
    assert!(map.contains("0x500000        0x10000         0x500000        base.raw\n"), "{map}");
    assert!(map.contains("compressed      overlay.qcow2\n"), "{map}");
}

/// An image with a bitmap whose table makes no sense.
fn with_broken_bitmap(image: &Path) {
    let name = image.to_str().expect("a name of ours");
    qemu_img(&["create", "-q", "-f", "qcow2", name, "8M"]);
    qemu_img(&["bitmap", "--add", name, "broken"]);
    let mut bytes = fs::read(image).expect("the image");
    let kind = 0x2385_2875_u32.to_be_bytes();
    let word = |bytes: &[u8], at: usize| {
        let word = bytes[at..at + 8].try_into().expect("8 bytes");
        usize::try_from(u64::from_be_bytes(word)).expect("small")
    };
    let extension = bytes.windows(4).position(|w| w == kind).expect("the extension") + 8;
    let directory = word(&bytes, extension + 16);
    let table = word(&bytes, directory);
    bytes[table] = 0xff;
    fs::write(image, bytes).expect("the image");
}

#[test]
fn warnings_in_files_have_no_colours() {
    let directory = scratch();
    with_broken_bitmap(&directory.path().join("image"));
    let output = ringdisk_in(directory.path(), &["bitmap", "--add", "image", "more"]);
    let text = stderr(&output);
    assert_eq!(code(&output), 0, "{text}");
    assert!(text.contains("ringdisk: warning: ") && text.contains("broken"), "{text}");
    assert!(!text.contains('\x1b'), "{text:?}");
}

#[test]
fn a_check_names_bitmaps_that_cannot_be_read_and_a_repair_removes_them() {
    let directory = scratch();
    with_broken_bitmap(&directory.path().join("image"));
    let check = |words: &[&str]| {
        let output = ringdisk_in(directory.path(), words);
        (code(&output), stdout(&output) + &stderr(&output))
    };
    let (exit, text) = check(&["check", "image"]);
    assert_eq!(exit, 2, "{text}");
    assert!(text.contains("bitmap 'broken' cannot be used"), "{text}");
    let (exit, text) = check(&["check", "--repair", "all", "image"]);
    assert_eq!(exit, 0, "{text}");
    assert!(text.contains("bitmap 'broken' is removed"), "{text}");
    assert_eq!(check(&["check", "image"]).0, 0);
    qemu_img(&["check", "-q", "-f", "qcow2", directory.path().join("image").to_str().expect("it")]);
}

#[test]
fn messages_of_a_check_do_not_send_the_user_to_a_check() {
    let directory = scratch();
    fs::write(directory.path().join("image"), b"QFI\xfb\0\0\0\x03").expect("a file");
    let output = ringdisk_in(directory.path(), &["check", "image"]);
    let text = stderr(&output);
    assert_eq!(code(&output), 1, "{text}");
    assert!(!text.contains("ringdisk check"), "{text}");
}
