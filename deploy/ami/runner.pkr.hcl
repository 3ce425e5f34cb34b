# An image for g6 and g6e: Ubuntu 22.04, a pinned NVIDIA driver, the wheel, the runner and nvCOMP. The order is the
# point: what is snapshotted is what the gate has seen, on the kernel and the driver that it was seen on. Build with
#   packer init . && packer build -var package=../../target/debian/s4weights.deb -var wheel=... .

packer {
  required_plugins {
    amazon = {
      version = ">= 1.3.0"
      source  = "github.com/hashicorp/amazon"
    }
  }
}

variable "region" {
  type    = string
  default = "us-east-1"
}

variable "instance_type" {
  type    = string
  default = "g6.xlarge"
}

variable "driver" {
  type        = string
  default     = "580"
  description = "Branch of the NVIDIA driver, from Ubuntu's own signed modules"
}

variable "package" {
  type        = string
  description = "The runner's .deb"
}

variable "wheel" {
  type        = string
  description = "The Python wheel"
}

variable "commit" {
  type        = string
  description = "The commit that both were built from"
}

variable "nvcomp" {
  type        = string
  default     = "6.0.0"
  description = "Version of NVIDIA's package nvidia-nvcomp-cu12"
}

source "amazon-ebs" "runner" {
  region        = var.region
  instance_type = var.instance_type
  ssh_username  = "ubuntu"
  ami_name      = "s4weights-runner-ubuntu-22.04-{{timestamp}}"
  encrypt_boot  = true
  imds_support  = "v2.0"

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  source_ami_filter {
    owners      = ["099720109477"]
    most_recent = true
    filters = {
      name                = "ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-amd64-server-*"
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
  }

  launch_block_device_mappings {
    device_name           = "/dev/sda1"
    volume_size           = 50
    volume_type           = "gp3"
    delete_on_termination = true
  }

  tags = {
    Name   = "s4weights-runner"
    Commit = var.commit
  }
}

build {
  sources = ["source.amazon-ebs.runner"]

  # 1. The driver, pinned.
  provisioner "shell" {
    script           = "${path.root}/install-driver.sh"
    environment_vars = ["DRIVER=${var.driver}"]
    execute_command  = "sudo env {{ .Vars }} bash {{ .Path }}"
  }

  # 2. Its kernel runs from here on.
  provisioner "shell" {
    inline            = ["sudo systemctl reboot"]
    expect_disconnect = true
  }

  # 3. The runner, the wheel, nvCOMP and CloudFormation's signal.
  provisioner "file" {
    source       = var.package
    destination  = "/tmp/s4weights.deb"
    pause_before = "30s"
  }

  provisioner "file" {
    source      = var.wheel
    destination = "/tmp/"
  }

  provisioner "shell" {
    script           = "${path.root}/install-runner.sh"
    environment_vars = ["NVCOMP=${var.nvcomp}"]
    execute_command  = "sudo env {{ .Vars }} bash {{ .Path }}"
  }

  # 4. The gate: if it fails there is no image.
  provisioner "shell" {
    script           = "${path.root}/gate.sh"
    environment_vars = ["COMMIT=${var.commit}"]
    execute_command  = "sudo env {{ .Vars }} bash {{ .Path }}"
  }

  # 5. Nothing of this machine stays in the image.
  provisioner "shell" {
    script          = "${path.root}/scrub.sh"
    execute_command = "sudo bash {{ .Path }}"
  }

  post-processor "manifest" {
    output = "manifest.json"
  }
}
