use std::os::fd::AsRawFd;

use super::*;

#[test]
fn an_open_file_names_its_mount_and_a_mapping_its_file_system() {
    assert_eq!(mount_id("pos:\t0\nflags:\t0100000\nmnt_id:\t69\nino:\t1\n"), Some(69));
    assert_eq!(mount_id("pos:\t0\n"), None);
    let line = "7f5e-7f60 rw-s 00000000 00:39 1                          /var/tmp/disk";
    assert!(is_of_device(line, (0, 57)));
    assert!(!is_of_device(line, (0, 58)));
    assert!(!is_of_device("7f5e-7f60 rw-p 00000000 00:00 0", (0, 57)));
    assert!(!is_of_device("", (0, 0)));
}

#[test]
fn users_are_named_and_those_who_cannot_be_seen_are_counted() {
    let device = Device { name: "loop0".into(), mounted: vec!["/mnt".into()], is_swap: false };
    let process = Process { pid: 7, name: "dd".into() };
    let users = Users { devices: vec![device], processes: vec![process], more: 2 };
    let text = "loop0 (mounted on /mnt), process 7 (dd), 2 more processes";
    assert_eq!(users.text(Some(3)), text);
    assert!(Users::default().text(Some(3)).starts_with("3 open files"));
    assert!(Users::default().text(None).contains("cannot be seen"));
}

#[test]
fn names_that_others_choose_control_no_terminal_and_begin_no_line() {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};
    let script = "printf 'a\\033[2J\\nb' > /proc/$$/comm; echo; read wait";
    let mut child = Command::new("sh")
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sh");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let mut users = Users::default();
    users.add(child.id());
    drop(child.stdin.take());
    child.wait().expect("it ends");
    let text = users.text(None);
    assert!(text.contains("(a\\u{1b}[2J\\nb)"), "{text:?}");
}

#[test]
fn a_process_with_an_open_file_is_found_by_its_mount() {
    let file = tempfile::tempfile().expect("a file");
    let number = file.as_raw_fd();
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).expect("info");
    let id = mount_id(&info).expect("a number");
    let pid = std::process::id();
    let device = device_of(Path::new(&format!("/proc/self/fd/{number}"))).expect("a device");
    assert!(open_files(pid, &HashSet::from([id])).contains(&(id, Some(device))));
    assert!(open_files(pid, &HashSet::from([u64::MAX])).is_empty());
    assert!(!tables(&[pid]).is_empty());
}
